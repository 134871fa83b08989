"""script.py with sets of archives: told from shards, planned by worker, downloaded, converted."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from edit_sets import SETS, make_set, pairs_of, read_shards
from helpers import ROOT
from hub_server import hub_of_this_process
from hypothesis import given, settings
from hypothesis import strategies as st
from known_sets import IMAGE

import parquet_processing
import script
from diffusers_flax.data.archives import remote
from diffusers_flax.data.remote_shards import CONVERTED_REF

IMGEDIT = "sysuyy/ImgEdit"
TEXT, BYTES = pa.array(["a.png"]), pa.array([{"bytes": b"x", "path": None}], IMAGE)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub, an empty working directory and no TPU."""
    with hub_of_this_process(monkeypatch, tmp_path) as hub:
        yield hub


def parquet(**columns):
    """The bytes of a parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns or {"prompt": TEXT}), buffer)
    return buffer.getvalue()


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


def refuse(capsys, *flags):
    """The one line with which script.py refuses; nothing is planned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        plan(*flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert not Path("plan").exists()
    return error


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


# --- Archives or shards ---------------------------------------------------------------------------


def test_a_set_is_planned_though_its_index_is_converted(hub, tmp_path, capsys):
    """Two workers: parts stay together, all get the index, sizes and checksums are the hub's."""
    files, _ = upload(hub, IMGEDIT, tmp_path / "set")
    hub.add(IMGEDIT, {"default/train/0000.parquet": parquet()}, CONVERTED_REF)
    planned = plan("--dataset", IMGEDIT, "--num_workers=2", "--worker=1")
    assert planned.keys() == files.keys()
    for name, row in planned.items():
        assert row["url"] == f"{hub.endpoint}/datasets/{IMGEDIT}/resolve/main/{name}"
        assert row["size"] == len(files[name])
        assert row["sha256"] == hashlib.sha256(files[name]).hexdigest()
        assert (row["worker"] is None) == name.endswith(".parquet")
    owners = [
        {row["worker"] for name, row in planned.items() if f"/{archive}.tar" in name}
        for archive in ("add_part0", "results_content_memory_part2")
    ]
    assert sorted(map(list, owners)) == [[0], [1]]
    for k in range(2):
        lines = Path(f"plan/download-{k}.txt").read_text().splitlines()
        assert lines[0] == "# archives"
        mine = [name for name, row in planned.items() if row["worker"] in (k, None)]
        assert [x.removeprefix("  out=") for x in lines if x.startswith("  out=")] == mine
    assert len([path for path in hub.paths() if path.startswith("/cdn/")]) == 1  # one footer

    out = capsys.readouterr().out
    assert "comes as 2 archives in 5 parts, 2 index files; shards are made after" in out
    assert out.splitlines()[-1] == (
        "then: python parquet_processing.py --pairs downloads --output_dir data"
    )
    assert re.search(
        r"next, on worker 1, \d files, .*: bash script.sh plan/download-1.txt downl", out
    )


@pytest.mark.parametrize(
    ("own", "converted", "is_shards"),
    [
        ({"data/train-0.parquet": parquet(image=BYTES), "Benchmark.tar": b"x"}, {}, True),
        ({"train.tar": b"x", "metadata.parquet": parquet()}, {}, False),
        # The largest file decides.
        ({"t.tar": b"", "a.parquet": parquet(), "b.parquet": parquet(x=BYTES, y=BYTES)}, {}, True),
        ({"t.tar": b"", "m.jsonl": b"{}"}, {"default/train/0.parquet": parquet()}, False),
        ({"t.tar": b"", "m.jsonl": b"{}"}, {"default/train/0.parquet": parquet(x=BYTES)}, True),
        # WebDataset's conversion has columns of images, named by file extensions.
        (
            {"0.tar": b"", "1.tar": b""},
            {"default/train/0.parquet": parquet(__key__=TEXT, jpg=BYTES)},
            False,
        ),
        ({"0.tar": b""}, {"default/partial-train/0.parquet": parquet(x=BYTES)}, False),
        ({f"i/{n}.jpg": b"" for n in range(20)} | {"metadata.jsonl": b"{}"}, {}, False),
        ({f"i/{n}.jpg": b"" for n in range(20)} | {"train.parquet": parquet()}, {}, False),
        ({f"i/{n}.jpg": b"" for n in range(19)} | {"train.parquet": parquet()}, {}, True),
        ({f"i/{n}.jpg": b"" for n in range(99)} | {"train.parquet": parquet(x=BYTES)}, {}, True),
    ],
)
def test_archives_are_told_from_shards(hub, capsys, own, converted, is_shards):
    hub.add("a/b", own)
    if converted:
        hub.add("a/b", converted, CONVERTED_REF)
    plan("--dataset=a/b", "--num_workers=1")
    out = capsys.readouterr().out
    assert ("the set comes as " in out) == ("--pairs" in out) == (not is_shards), out
    assert f"bash script.sh plan/download-0.txt {'data' if is_shards else 'downloads'}\n" in out


def test_a_gated_set_says_how_to_get_access(hub, tmp_path, capsys):
    upload(hub, IMGEDIT, tmp_path / "set")
    hub.token, hub.gated = "hf_x", {IMGEDIT}
    error = refuse(capsys, "--dataset", IMGEDIT, "--num_workers=1")
    assert "ask for access" in error and "HF_TOKEN" in error


# --- Which files, on which worker -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "archives", "num_indexes"),
    [
        (["Singleturn/*"], ["add_part0"], 2),
        (["Singleturn/"], ["add_part0"], 2),
        (["*.tar.split.001", "Parquet/add*"], ["add_part0", "results_content_memory_part2"], 1),
        (["Singleturn/add_part0.tar", "*.parquet"], ["add_part0"], 2),
    ],
)
def test_include_chooses_whole_archives(hub, tmp_path, include, archives, num_indexes):
    files, _ = upload(hub, IMGEDIT, tmp_path / "set")
    planned = plan("--dataset", IMGEDIT, "--num_workers=1", "--include", *include)
    wanted = [name for name in files if any(f"/{x}.tar" in name for x in archives)]
    assert [name for name in planned if ".tar" in name] == sorted(wanted)
    assert len(planned) == len(wanted) + num_indexes


def test_patterns_that_choose_nothing(hub, tmp_path, capsys):
    upload(hub, IMGEDIT, tmp_path / "set")
    flags = ("--dataset", IMGEDIT, "--num_workers=1", "--include")
    assert refuse(capsys, *flags, "Singleturn/*", "add_part0*") == (
        f"error: --include add_part0* fits no file of {IMGEDIT}; it has "
        "Multiturn/results_content_memory_part2.tar, Singleturn/add_part0.tar\n"
    )
    assert "chooses only indexes" in refuse(capsys, *flags, "*.parquet")
    hub.add("a/b", {"data/train-0.parquet": parquet(), "data/train-1.parquet": parquet()})
    flags = ("--dataset=a/b", "--num_workers=1", "--include")
    assert "fits no shard of a/b; it has data/train-0.parquet" in refuse(capsys, *flags, "train-0*")
    assert list(plan(*flags, "*/train-1*")) == ["data-train-1.parquet"]


def test_max_shards_takes_the_first_archives(hub, tmp_path):
    files, _ = upload(hub, IMGEDIT, tmp_path / "set")
    planned = plan("--dataset", IMGEDIT, "--num_workers=1", "--max_shards=1")
    assert planned.keys() == {name for name in files if not name.startswith("Singleturn")}


def test_image_files_go_by_directory_and_figures_are_left_out(hub, tmp_path, capsys):
    """Both images of a pair are in one directory, or in input/ and output/ of one."""
    files, _ = upload(hub, "iitolstykh/NHR-Edit", tmp_path / "set")
    sides = {
        f"{k}/{side}/{n}.png": b"x" for k in "ab" for side in ("input", "output") for n in "123"
    }
    hub.add("a/sides", {f"x/{path}": b"x" for path in sides for x in [path[0]]})
    hub.add(
        "a/sides", {f"{n}/{path}": b"x" for n in range(2) for path in sides} | {"m.json": b"[]"}
    )
    for name in ("iitolstykh/NHR-Edit", "a/sides"):
        planned = plan("--dataset", name, "--num_workers=2")
        folders = {}
        for path, row in planned.items():
            if path.endswith((".jpg", ".png")):
                folder = re.sub(r"/(input|output)$", "", path.rpartition("/")[0])
                folders.setdefault(folder, set()).add(row["worker"])
            else:
                assert row["worker"] is None
        assert all(len(workers) == 1 for workers in folders.values())
        assert set().union(*folders.values()) == {0, 1}
    hub.trees["iitolstykh/NHR-Edit", "main"] |= {"t.tar": b""}
    few = [path for path in files if path.endswith(".jpg")][19:]
    for path in few:
        del hub.trees["iitolstykh/NHR-Edit", "main"][path]
    del hub.trees["iitolstykh/NHR-Edit", "main"]["assets/figure.png"]
    planned = plan("--dataset=iitolstykh/NHR-Edit", "--num_workers=1")
    assert planned.keys() == {"t.tar", "train/metadata.jsonl"}


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(1, 10**12), min_size=1, max_size=5), min_size=1, max_size=30),
    st.integers(1, 9),
)
def test_archives_are_balanced_and_stay_whole(sizes, num_workers):
    rows = [
        {"file": f"a/{n:02d}.tar.{part:03d}", "url": "", "size": size, "worker": None}
        for n, parts in enumerate(sizes)
        for part, size in enumerate(parts)
    ]
    found = remote.archives_of([*rows, {"file": "m.json", "size": 5, "worker": None}], (), "x", "x")
    script.assign(found, num_workers)
    loads, owners = [0] * num_workers, {}
    for row in rows:
        loads[row["worker"]] += row["size"]
        owners.setdefault(row["file"][:8], set()).add(row["worker"])
    assert all(len(workers) == 1 for workers in owners.values())
    totals = list(map(sum, sizes))
    assert max(loads) <= sum(totals) / num_workers + max(totals)
    assert [row["worker"] for row in found.common] == [None]


def test_a_pair_may_need_any_two_archives(hub, tmp_path, capsys):
    """Inter-Edit-Train: every worker downloads all, and converts its share."""
    name = "a1557811266/Inter-Edit-Train"
    files, _ = upload(hub, name, tmp_path / "set")
    planned = plan("--dataset", name, "--num_workers=2", "--worker=1")
    assert planned.keys() == files.keys()
    assert {row["worker"] for row in planned.values()} == {None}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("--output_dir data --worker 1 --num_workers 2")
    assert {row["worker"] for row in plan("--dataset", name, "--num_workers=1").values()} == {
        0,
        None,
    }


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../outside.tar",
        "a/../../outside.tar",
        "/etc/passwd.tar",
        "a//b.tar",
        "a/./b.tar",
        "a\\b.tar",
        "a\n  out=b/x.tar",
        "a\x1b[31m.tar",
        "a\u202e.tar",
        "\ud800.tar",
        " a.tar",
        "a /b.tar",
        f"{'x' * 300}.tar",
        f"{'é' * 100}.tar",
        "../index.jsonl",
    ],
)
def test_hostile_names_are_refused(hub, capsys, path):
    hub.add("a/b", {"good.tar": b"x", path: b"x", "index.jsonl": b"{}"})
    error = refuse(capsys, "--dataset=a/b", "--num_workers=1")
    assert "error: a/b has a file " in error and "are refused" in error
    assert error.isascii() or "é" in error


def test_hidden_files_are_left_out(hub):
    hub.add("a/b", {"good.tar": b"x", ".verified.tar": b"x", ".unfinished/a.tar": b"x"})
    assert list(plan("--dataset=a/b", "--num_workers=1")) == ["good.tar"]


def test_a_missing_part_is_refused_unless_it_is_not_wanted(hub, tmp_path, capsys):
    upload(hub, IMGEDIT, tmp_path / "set")
    del hub.trees[IMGEDIT, "main"]["Singleturn/add_part0.tar.split.001"]
    flags = ("--dataset", IMGEDIT, "--num_workers=1")
    assert refuse(capsys, *flags).startswith(
        f"error: {IMGEDIT}/Singleturn/add_part0.tar: the part before add_part0.tar.split.002 is "
    )
    assert len(plan(*flags, "--include", "Multiturn/*")) == 4


def test_flags_and_archives_that_do_not_fit(hub, tmp_path, capsys, monkeypatch):
    upload(hub, IMGEDIT, tmp_path / "set")
    flags = ("--dataset", IMGEDIT, "--num_workers=1")
    assert "these are archives with an index; leave it out" in refuse(capsys, *flags, "--columns")
    assert "leave out --config and --split" in refuse(capsys, *flags, "--split=test")
    monkeypatch.setattr(script, "MAX_FILES", 6)
    assert "7 files for one worker are too many" in refuse(capsys, *flags)
    hub.add("a/zip", {"a.zip": b"x", "train.jsonl": b"{}"})
    assert "archives such as a.zip, which are not .tar" in refuse(capsys, "--dataset=a/zip")


def test_what_has_to_be_downloaded_first(hub, tmp_path, capsys):
    pico, gpt = "apple/pico-banana-400k", "UCSC-VLAA/GPT-Image-Edit-1.5M"
    error = refuse(capsys, "--dataset", pico)
    assert "no such dataset" in error and "map_openimage_url_to_local.py" in error
    hub.add(pico, {"sft.jsonl": b"{}"})
    hub.add(pico, {"default/train/0000.parquet": parquet()}, CONVERTED_REF)
    assert list(plan("--dataset", pico)) == ["sft.jsonl"]
    hub.add(gpt, {"gpt-edit/omniedit/0.tar": b""})
    plan("--dataset", gpt)
    steps = [x for x in capsys.readouterr().out.splitlines() if x.startswith("before the last")]
    assert len(steps) == 2 and "by URL only" in steps[0]
    assert "hf download UCSC-VLAA/gpt-image-edit-training" in steps[1]


# --- Lists of addresses ---------------------------------------------------------------------------


def test_a_list_may_name_archives(tmp_path, hub, capsys):
    """Directories below the common one are kept; shards are named as before."""
    file = tmp_path / "urls.txt"

    def planned(*urls):
        file.write_text("\n".join(urls))
        return plan("--urls", file, "--num_workers=2")

    base = "https://host/sets/v1"
    rows = planned(f"{base}/a/0.tar.000 5", f"{base}/a/0.tar.001", f"{base}/m%20n.jsonl?x=1")
    assert {name: row["worker"] for name, row in rows.items()} == {
        "a/0.tar.000": 0,
        "a/0.tar.001": 0,
        "m n.jsonl": None,
    }
    assert planned(f"{base}/a/0.tar").keys() == {"0.tar"}
    rows = planned(
        "https://hf.co/datasets/a/b/resolve/main/x/0.tar", "https://h/x/1.tar", "https://h/x/2.jpg"
    )
    assert rows.keys() == {"0.tar", "1.tar", "2.jpg"}
    shutil.rmtree("plan")
    for urls, message in (
        (("https://h/a/0.tar", "https://g/a/0.tar"), "has two files of the name 0.tar"),
        (("https://h/a/0.tar", "https://h/a/..%2F..%2Fx.tar"), "has a file ../../x.tar"),
        (("https://h/a/0.tar", "https://h/a/notes.txt"), "notes.txt, which is no .tar"),
        (("https://h/a/0.tar", "https://h/a/b.zip"), "b.zip, which is no .tar"),
    ):
        file.write_text("\n".join(urls))
        assert message in refuse(capsys, "--urls", file, "--num_workers=1")


# --- To the end -----------------------------------------------------------------------------------


def test_plan_download_convert(hub, tmp_path, capsys):
    """One worker with everything has every pair; raw archives are no shards."""
    files, pairs = upload(hub, IMGEDIT, tmp_path / "set")
    hub.add(IMGEDIT, {"default/train/0000.parquet": parquet()}, CONVERTED_REF)
    plan("--dataset", IMGEDIT, "--num_workers=1")
    assert ": 7 files" in download(hub) and not Path("downloads/.unfinished").exists()
    for name, content in files.items():
        assert Path("downloads", name).read_bytes() == content
    assert "fetched 0 MB" in download(hub)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parquet_processing.main(["--train_data_dir", "downloads"])
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and "parquet_processing.py --pairs downloads --output_dir" in error
    )
    assert convert("downloads", "data") == pairs


def test_an_index_is_not_streamed(hub, tmp_path, capsys):
    files, _ = upload(hub, IMGEDIT, tmp_path / "set")
    index = {"default/train/0000.parquet": files["Parquet/add_part0.parquet"]}
    hub.add(IMGEDIT, index, CONVERTED_REF)
    with pytest.raises(SystemExit):
        parquet_processing.main(["--train_data_dir", f"hf://datasets/{IMGEDIT}"])
    error = capsys.readouterr().err
    assert error.endswith("cannot be streamed: download the set with script.py\n")


@pytest.mark.slow
def test_unusual_names_arrive(hub):
    names = ("ä b/x+#%20'[1]{2}$(x)*.tar", "-x/--out=y.tar.gz", "a&b;c=d?.jsonl", "a'b/index.json")
    files = {name: name.encode() for name in names}
    hub.add("a/b", files)
    assert plan("--dataset=a/b", "--num_workers=1").keys() == files.keys()
    download(hub)
    for name, content in files.items():
        assert Path("downloads", name).read_bytes() == content
    assert "fetched 0 MB" in download(hub) and len(Path("downloads/.verified").read_text()) > 0


def test_raw_archives_and_incomplete_downloads_are_refused(tmp_path, capsys):
    """An index among the archives is no shard; the converter waits for script.sh."""
    folder = tmp_path / "set"
    make_set(IMGEDIT, folder)
    shutil.copy(folder / "Parquet" / "add_part0.parquet", folder)
    with pytest.raises(SystemExit):
        parquet_processing.main(["--train_data_dir", str(folder)])
    error = capsys.readouterr().err
    assert "if it is the index of archives such as Multiturn/results_content" in error
    (folder / ".unfinished").mkdir()
    with pytest.raises(SystemExit):
        convert(folder, tmp_path / "data")
    assert "is not complete, as it contains .unfinished: run script.sh" in capsys.readouterr().err


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
