"""Sets of archives to the end: planned by script.py, downloaded by script.sh, converted."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from edit_sets import SETS, make_set, pairs_of, read_shards
from helpers import ROOT
from hub_server import hub_of_this_process

import parquet_processing
import script

IMGEDIT = "sysuyy/ImgEdit"
CONVERTED = "refs/convert/parquet"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub, an empty working directory and no TPU."""
    with hub_of_this_process(monkeypatch, tmp_path) as hub:
        yield hub


def upload(hub, name, folder, count=24):
    """Put a synthetic set into a repository of the hub; returns its files and pairs."""
    pairs = make_set(name, folder, count)
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    hub.add(name, files | {"README.md": b"", ".gitattributes": b"", "assets/figure.png": b"x"})
    return files, pairs


def plan(*flags):
    """Run script.py in this process: {file of the manifest: row}."""
    script.main([*map(str, flags)])
    rows = json.loads(Path("plan/manifest.json").read_text())["files"]
    return {row["file"]: row for row in rows}


def download(hub, *arguments):
    """Run script.sh: its output."""
    names = ("PATH", "LANG")
    env = {key: os.environ[key] for key in names if key in os.environ}
    env |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": "/no/such",
        "RETRY_WAIT": "1",
        "MAX_ROUNDS": "3",
    }
    command = ["bash", ROOT / "script.sh", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def convert(pairs, output_dir, *flags):
    """Run parquet_processing.py in this process: the pairs of the shards."""
    flags = ["--pairs", str(pairs), "--output_dir", str(output_dir), "--preview", "", *flags]
    parquet_processing.main(flags)
    return pairs_of(read_shards(Path(output_dir)))


def test_plan_download_convert(hub, tmp_path, capsys):
    """One worker with everything has every pair; raw archives are no shards."""
    files, pairs = upload(hub, IMGEDIT, tmp_path / "set")
    hub.add(IMGEDIT, {"default/train/0000.parquet": files["Parquet/add_part0.parquet"]}, CONVERTED)
    plan("--dataset", IMGEDIT, "--num_workers=1")
    assert ": 7 files" in download(hub) and not Path("downloads/.unfinished").exists()
    for name, content in files.items():
        assert Path("downloads", name).read_bytes() == content
    assert "fetched 0 MB" in download(hub)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parquet_processing.main(["--train_data_dir", "downloads"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "parquet_processing.py --pairs" in error
    assert convert("downloads", "data") == pairs


def test_raw_archives_and_incomplete_downloads_are_refused(tmp_path, capsys):
    """An index among the archives is no shard; the converter waits for script.sh."""
    folder = tmp_path / "set"
    make_set(IMGEDIT, folder)
    shutil.copy(folder / "Parquet" / "add_part0.parquet", folder)
    with pytest.raises(SystemExit):
        parquet_processing.main(["--train_data_dir", str(folder)])
    error = capsys.readouterr().err
    assert "add_part0.parquet has no column original_image" in error
    (folder / ".unfinished").mkdir()
    with pytest.raises(SystemExit):
        convert(folder, tmp_path / "data")
    assert "is not complete, as it contains .unfinished: run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_set_on_two_workers_and_on_one(hub, tmp_path, name):
    """One worker has all pairs; two have only right ones, and none twice."""
    _, pairs = upload(hub, name, tmp_path / "set", 48)
    del hub.trees[name, "main"]["assets/figure.png"]
    plan("--dataset", name, "--num_workers=1")
    download(hub)
    assert convert("downloads", "data") == pairs
    planned = plan("--dataset", name, "--num_workers=2")
    owners = {row["worker"] for row in planned.values()} - {None}
    found = {}
    for k in range(2):
        download(hub, f"plan/download-{k}.txt", f"raw{k}")
        flags = [] if name == IMGEDIT else ["--max_bad_fraction", "1"]
        if not owners:  # both have everything
            flags += ["--worker", str(k), "--num_workers", "2"]
        elif k not in owners:  # of one archive
            continue
        try:
            mine = convert(f"raw{k}", f"data{k}", *flags)
        except SystemExit:  # the result of each pair is in one archive
            assert not owners
            continue
        assert not mine.keys() & found.keys()
        found |= mine
    assert found == pairs
    assert owners == {0, 1} or name not in (IMGEDIT, "iitolstykh/NHR-Edit")
