"""script.py against a fake hub: listing, assignment to workers, written files."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.utils._http
import pytest
from edit_sets import make_set
from helpers import ROOT
from hub_server import hub_of_this_process
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

import script

TOKEN = "hf_tokenThatMustNotLeak"
PAPER = "timbrooks/instructpix2pix-clip-filtered"
IMGEDIT = "sysuyy/ImgEdit"
CONVERTED = "refs/convert/parquet"
WORKER_FILE = f"worker-{socket.gethostname()}"  # contains this host's worker index


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake hub for script.py in this process, an empty working directory and no TPU."""
    with hub_of_this_process(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def sleeps(monkeypatch):
    """Record calls of time.sleep instead of sleeping."""
    waits = []
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", waits.append)
    return waits


def plan(*flags, output_dir="plan"):
    """Run script.py in this process: {name: row of the manifest}."""
    script.main([*map(str, flags), f"--output_dir={output_dir}"])
    files = json.loads(Path(output_dir, "manifest.json").read_text())["files"]
    assert len({file["file"] for file in files}) == len(files)
    return {file["file"]: file for file in files}


def sizes(*flags):
    return [file["size"] for file in plan(*flags).values()]


def error_of(capsys, *flags):
    """Run script.py, which must fail, and return its one error line; nothing is planned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        plan(*flags, output_dir="refused")
    assert exit_info.value.code == 2 and not Path("refused").exists()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def parse_aria2_input(path):
    """Parse an aria2 input file strictly: [(size, url, out, sha256)]."""
    entry = re.compile(
        r"(?:# size=(\d+)\n)?(http\S+)\n  out=(\S+)\n(?:  checksum=sha-256=([0-9a-f]{64})\n)?"
    )
    text = Path(path).read_text()
    assert re.fullmatch("(# .*\n)?", entry.sub("", text)), text
    return [
        (int(size) if size else None, url, out, sha256 or None)
        for size, url, out, sha256 in entry.findall(text)
    ]


def start_script(hub, *flags, cwd, **env):
    """Start script.py in a separate process with a clean environment."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TPU_", "MEGASCALE_"))
        and not name.lower().endswith("_proxy")
    }
    environment |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(cwd / "home"),
        "GCE_METADATA_HOST": f"127.0.0.1:{hub.port}",
        **env,
    }
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, ROOT / "script.py", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


def run_script(hub, *flags, cwd, **env):
    """Run script.py in a separate process: (exit code, stdout, stderr)."""
    with start_script(hub, *flags, cwd=cwd, **env) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


# --- Assignment to workers ----------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [7, 64])
def test_near_equal_shards(hub, num_workers):
    """262 shards of 489 to 504 MB: disjoint, complete, within one shard of the mean, and the same
    on every host except for the file with the worker index."""
    num_bytes = [489_000_000 + 7919 * 1893 * i % 15_000_000 for i in range(262)]
    names = [f"data/train-{i:05d}-of-00262-{i:08x}.parquet" for i in range(262)]
    hub.add(PAPER, dict(zip(names, num_bytes)))
    files = plan("--dataset", PAPER, "--num_workers", num_workers).values()
    assert [file["size"] for file in files] == num_bytes
    parts = [parse_aria2_input(f"plan/download-{k}.txt") for k in range(num_workers)]
    assert Counter(entry[1] for part in parts for entry in part) == Counter(
        file["url"] for file in files
    )
    loads = [sum(entry[0] for entry in part) for part in parts]
    assert max(loads) <= sum(num_bytes) / num_workers + max(num_bytes)
    assert max(loads) - min(loads) <= max(num_bytes)

    written = {path.name: path.read_bytes() for path in Path("plan").iterdir()}
    for k in {0, num_workers // 2, num_workers - 1}:
        plan("--dataset", PAPER, "--num_workers", num_workers, "--worker", k, output_dir=f"of{k}")
        by_k = {path.name: path.read_bytes() for path in Path(f"of{k}").iterdir()}
        assert by_k == written | {WORKER_FILE: b"%d\n" % k}


def assigned(units, num_workers):
    """The worker of each unit, a list of sizes."""
    units = [[{"size": size} for size in unit] for unit in units]
    script.assign_workers(units, num_workers)
    assert all(len({file["worker"] for file in unit}) == 1 for unit in units), "a unit is split"
    return [unit[0]["worker"] for unit in units]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.none() | st.integers(1, 10**12), min_size=1, max_size=3), max_size=80),
    st.integers(1, 70),
)
def test_random_sizes(units, num_workers):
    workers = assigned(units, num_workers)
    assert set(workers) <= set(range(num_workers))
    is_unknown = any(None in unit for unit in units)
    weights = [len(unit) if is_unknown else sum(unit) for unit in units]
    # Larger units come first; each goes to the first of the least loaded workers.
    loads = [0] * num_workers
    for weight, _, worker in sorted(
        (-weight, i, worker) for i, (weight, worker) in enumerate(zip(weights, workers))
    ):
        assert worker == loads.index(min(loads))
        loads[worker] -= weight
    assert max(loads) <= sum(weights) / num_workers + max(weights, default=0)


# --- Shards on the hub ---------------------------------------------------------------------------


def test_converted_listing(hub, capsys):
    """A complete conversion is preferred; pagination works; sizes and checksums are the hub's."""
    shards = {f"default/train/{i:04d}.parquet": b"x" * (i + 1) for i in range(60)}
    hub.add("a/b", shards | {"default/test/0000.parquet": b"x"}, CONVERTED)
    hub.add("a/b", {"data/train-00000-of-00001.parquet": b"x"})
    files = plan("--dataset=a/b", "--num_workers=1")
    assert [*files] == [path.replace("/", "-") for path in sorted(shards)]
    for file, (path, content) in zip(files.values(), sorted(shards.items())):
        assert file == {
            "url": f"{hub.endpoint}/datasets/a/b/resolve/refs%2Fconvert%2Fparquet/{path}",
            "file": path.replace("/", "-"),
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "rows": None,
            "worker": 0,
        }
    names = ("size", "url", "file", "sha256")
    expected = [tuple(file[name] for name in names) for file in files.values()]
    assert parse_aria2_input("plan/download-0.txt") == expected
    # The repository, and two pages of the conversion; huggingface_hub may ask for other things.
    assert sum("/api/datasets/" in request[1] for request in hub.requests) == 3
    assert "bash script.sh plan/download-0.txt\n" in capsys.readouterr().out
    assert len(plan("--dataset=a/b", "--num_workers=1", "--split=test")) == 1


@pytest.mark.parametrize(
    "converted",
    [
        {"default/partial-train/0000.parquet": b"x"},
        {"default/train/0000.parquet": b"x", "default/partial-train/0000.parquet": b"y"},
    ],
)
def test_partial_conversion_is_not_used(hub, capsys, converted):
    hub.add("a/b", converted, CONVERTED)
    hub.add("a/b", {"data/train-00000-of-00001-abc.parquet": b"x", "README.md": b""})
    (file,) = plan("--dataset=a/b", "--num_workers=1").values()
    path = "resolve/main/data/train-00000-of-00001-abc.parquet"
    assert file["url"] == f"{hub.endpoint}/datasets/a/b/{path}"
    hub.trees["a/b", "main"] = {"train.csv": b"x"}
    assert "--urls" in error_of(capsys, "--dataset=a/b", "--num_workers=1")


def test_many_converted_parts(hub):
    """The hub splits more than 10000 files into several directories."""
    paths = [f"en/train-part{k}/{i:04d}.parquet" for k in (0, 1) for i in (0, 1)]
    hub.add("a/b", dict.fromkeys(paths, 7), CONVERTED)
    files = plan("--dataset=a/b", "--num_workers=1").values()
    assert [urlsplit(file["url"]).path.split("parquet/", 1)[1] for file in files] == paths
    assert {file["sha256"] for file in files} == {None}  # the hub has none of small files


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("data/train-00000-of-00262-04567e4fa3e84c1c.parquet", ("default", "train")),
        ("some images.parquet", ("default", "train")),
        ("train/0000.parquet", ("default", "train")),
        ("data/test/part-0-of-9.parquet", ("default", "test")),
        ("en/train-00000-of-00002.parquet", ("en", "train")),
        ("en/validation/x.snappy.parquet", ("en", "validation")),
        ("data/holdout-00000-of-00001.parquet", ("default", "holdout")),
        ("imagenet-train-00000-of-01024.parquet", ("default", "train")),
        ("a/b/x.parquet", ("a/b", "train")),
    ],
)
def test_layouts(path, where):
    assert script.config_and_split(path) == where


def test_configs_and_splits(hub, capsys):
    own = {
        "en/train-00000-of-00001.parquet": 10,
        "en/test-00000-of-00001.parquet": 11,
        "de/train-00000-of-00001.parquet": 12,
        ".cache/fr/train.parquet": 9,
        "train.csv": 8,
    }
    hub.add("a/b", own)
    flags = ("--dataset=a/b", "--num_workers=1")
    assert sizes(*flags, "--config=de") == [12]
    assert sizes(*flags, "--config=en", "--split=test") == [11]
    for wrong in ([], ["--config=en", "--split=dev"], ["--config=fr"]):
        error = error_of(capsys, *flags, *wrong)
        assert "--config" in error and "'de/train', 'en/test', 'en/train'" in error
    hub.add("a/b", {"train.parquet": 13})
    assert sizes(*flags) == [13]  # "default" among several configurations

    # With several converted configurations the repository's files are no fallback.
    hub.add("c/d", {"train.parquet": 1})
    hub.add("c/d", {"x/train/0000.parquet": 2, "y/train/0000.parquet": 3}, CONVERTED)
    assert "x/train" in error_of(capsys, "--dataset=c/d", "--num_workers=1")


def test_revision(hub, capsys):
    """--revision selects repository files and is quoted in the URL; only main is converted."""
    hub.add("a/b", {"default/train/0000.parquet": 1}, CONVERTED)
    hub.add("a/b", {"train.parquet": 2}, "refs/pr/1")
    (file,) = plan("--dataset=a/b", "--num_workers=1", "--revision=refs/pr/1").values()
    assert file["url"].endswith("/resolve/refs%2Fpr%2F1/train.parquet") and file["size"] == 2
    assert "Revision Not Found" in error_of(capsys, "--dataset=a/b", "--revision=v9")


def test_layouts_of_the_known_sets(hub, capsys):
    """The default takes the train split only; several splits are chosen by a pattern."""
    magic = [f"data/train-{n:05d}-of-00003-{n:016x}.parquet" for n in range(3)]
    magic_dev = [f"data/dev-{n:05d}-of-00002-{n + 9:016x}.parquet" for n in range(2)]
    omni = [f"data/{split}-{n:05d}-of-00002.parquet" for split in ("dev", "train") for n in (0, 1)]
    ultra = [f"data/FreeForm_{k}-{n:05d}-of-00002.parquet" for k in range(3) for n in (0, 1)]
    regions = [f"data/RegionBase-{n:05d}-of-00002.parquet" for n in (0, 1)]
    sets = {
        "osunlp/MagicBrush": magic + magic_dev,
        "TIGER-Lab/OmniEdit-Filtered-1.2M": omni,
        "BleachNick/UltraEdit": ultra,
        "BleachNick/UltraEdit_Region_Based_100k": regions,
    }
    for name, paths in sets.items():
        hub.add(name, dict.fromkeys([*paths, "README.md"], b"x"))

    def planned(name, *flags):
        files = plan("--dataset", name, *flags).values()
        return [file["url"].partition("/resolve/main/")[2] for file in files]

    # The hub's conversion has the first part of a set only.
    hub.add("osunlp/MagicBrush", {"default/partial-train/0000.parquet": b"x"}, CONVERTED)
    assert planned("osunlp/MagicBrush") == planned("osunlp/MagicBrush", "--split", "t*n") == magic
    assert planned("osunlp/MagicBrush", "--split", "dev") == magic_dev
    assert planned("TIGER-Lab/OmniEdit-Filtered-1.2M") == omni[2:]
    assert planned("BleachNick/UltraEdit", "--split", "FreeForm_*") == ultra
    assert planned("BleachNick/UltraEdit", "--split", "FreeForm_[01]") == ultra[:4]
    assert planned("BleachNick/UltraEdit_Region_Based_100k", "--split", "RegionBase") == regions
    assert "'default/FreeForm_0'" in error_of(capsys, "--dataset", "BleachNick/UltraEdit")


def test_shards_get_names_for_one_directory(hub, tmp_path):
    hub.add("a/b", {"data/x-y/train.parquet": 1, "data/x/y-train.parquet": 2})
    assert [*plan("--dataset=a/b", "--config=x-y")] == ["data-x-y-train.parquet"]
    urls = [
        "http://one/0000.parquet",
        "http://two/0000.parquet?x=1",
        "http://two/00000-0000.parquet",
        "http://three/..%2F.unfinished",
        "http://three/",
        "http://three/%20-o/" + 300 * "x" + ".parquet",
    ]
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    names = [*plan("--urls", tmp_path / "urls.txt")]
    assert all(re.fullmatch(r"[A-Za-z0-9_][\w.-]{0,230}\.parquet", name) for name in names), names
    assert [*plan("--urls", tmp_path / "urls.txt", "--max_shards=2")] == names[:2]
    (tmp_path / "urls.txt").write_text("\n".join(urls[3:5]))
    assert [*plan("--urls", tmp_path / "urls.txt")] == ["unfinished.parquet", "shard.parquet"]


# --- Sets of archives or images ------------------------------------------------------------------


def upload(hub, name, folder, count=24):
    """Put a synthetic set into a repository of the hub; returns its files."""
    make_set(name, folder, count)
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    hub.add(name, files | {"README.md": b"", ".gitattributes": b"", "assets/figure.png": b"x"})
    return files


def test_parts_stay_together_and_all_workers_get_the_index(hub, tmp_path, capsys):
    files = upload(hub, IMGEDIT, tmp_path / "set")
    hub.add(IMGEDIT, {"default/train/0000.parquet": b"x"}, CONVERTED)
    planned = plan("--dataset", IMGEDIT, "--num_workers=2", "--worker=1")
    assert planned.keys() == files.keys()
    for name, row in planned.items():
        assert row["url"] == f"{hub.endpoint}/datasets/{IMGEDIT}/resolve/main/{name}"
        assert row["sha256"] == hashlib.sha256(files[name]).hexdigest()
        assert (row["worker"] is None) == name.endswith(".parquet")
    owners = [
        {row["worker"] for name, row in planned.items() if f"/{archive}.tar" in name}
        for archive in ("add_part0", "results_content_memory_part2")
    ]
    assert sorted(map(list, owners)) == [[0], [1]]
    for k in range(2):
        assert Path(f"plan/download-{k}.txt").read_text().startswith("# archives\n")
        mine = [name for name, row in planned.items() if row["worker"] in (k, None)]
        assert [entry[2] for entry in parse_aria2_input(f"plan/download-{k}.txt")] == mine
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "then: python parquet_processing.py --pairs downloads --output_dir data"
    first = plan("--dataset", IMGEDIT, "--num_workers=1", "--max_shards=1")
    assert first.keys() == {name for name in files if not name.startswith("Singleturn")}


@pytest.mark.parametrize(
    ("own", "is_shards"),
    [
        ({"data/train-0.parquet": 900, "Benchmark.tar": 90}, True),
        ({"train.tar": 900, "metadata.parquet": 90}, False),
        ({"t.tar.gz.part-aa": 900, "t.tar.gz.part-ab": 900, "m.jsonl": 9}, False),
        ({f"i/{n}.jpg": 50 for n in range(20)} | {"metadata.jsonl": 9}, False),
        ({f"i/{n}.jpg": 50 for n in range(19)} | {"train.parquet": 90}, True),
        ({f"i/{n}.jpg": 50 for n in range(99)} | {"train.parquet": 9000}, True),
        ({"train.parquet": 90, "x.tar.xz": 900, "a.zip": 900}, True),
    ],
)
def test_sets_are_told_from_shards(hub, capsys, own, is_shards):
    hub.add("a/b", own)
    plan("--dataset=a/b", "--num_workers=1")
    assert ("--pairs" in capsys.readouterr().out) == (not is_shards)
    assert Path("plan/download-0.txt").read_text().startswith("# archives\n") == (not is_shards)


@pytest.mark.parametrize(
    ("include", "archives"),
    [
        (["Singleturn/*"], ["add_part0"]),
        (["Multiturn/*", "*/add_part0.tar"], ["add_part0", "results_content_memory_part2"]),
    ],
)
def test_include_chooses_whole_archives_and_all_indexes(hub, tmp_path, include, archives):
    files = upload(hub, IMGEDIT, tmp_path / "set")
    planned = plan("--dataset", IMGEDIT, "--num_workers=1", "--include", *include)
    wanted = [name for name in files if any(f"/{x}.tar" in name for x in archives)]
    assert [name for name in planned if ".tar" in name] == sorted(wanted)
    assert len(planned) == len(wanted) + 2


def test_image_files_go_by_directory_and_figures_are_left_out(hub, tmp_path):
    """Both images of a pair are in one directory, or in input/ and output/ of one."""
    upload(hub, "iitolstykh/NHR-Edit", tmp_path / "set")
    sides = [f"{n}/{k}/{s}/1.png" for n in range(9) for k in "ab" for s in ("input", "output")]
    hub.add("a/sides", dict.fromkeys([*sides, "m.json"], b"x"))
    for name in ("iitolstykh/NHR-Edit", "a/sides"):
        folders = {}
        for path, row in plan("--dataset", name, "--num_workers=2").items():
            if path.endswith((".jpg", ".png")):
                folder = re.sub(r"/(input|output)$", "", path.rpartition("/")[0])
                folders.setdefault(folder, set()).add(row["worker"])
            else:
                assert row["worker"] is None
        assert all(len(workers) == 1 for workers in folders.values())
        assert set().union(*folders.values()) == {0, 1}
    hub.add("a/few", {f"{n}.png": 1 for n in range(19)} | {"t.tar": 5, "m.json": 1})
    assert plan("--dataset=a/few").keys() == {"t.tar", "m.json"}


def test_a_pair_may_need_any_two_archives(hub, tmp_path, capsys):
    """Inter-Edit-Train: every worker downloads all, and converts its share."""
    name = "a1557811266/Inter-Edit-Train"
    files = upload(hub, name, tmp_path / "set")
    planned = plan("--dataset", name, "--num_workers=2", "--worker=1")
    assert planned.keys() == files.keys()
    assert {row["worker"] for row in planned.values()} == {None}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("--output_dir data --worker 1 --num_workers 2")
    planned = plan("--dataset", name, "--num_workers=1").values()
    assert {row["worker"] for row in planned} == {0, None}


def test_a_list_may_name_archives(tmp_path, hub):
    """Paths on the server, or in the repository, are kept."""
    file = tmp_path / "urls.txt"

    def planned(*urls):
        file.write_text("\n".join(urls))
        return {
            name: row["worker"] for name, row in plan("--urls", file, "--num_workers=2").items()
        }

    base = "https://host/sets/v1"
    urls = (f"{base}/a/0.tar.000 5", f"{base}/a/0.tar.001", f"{base}/m%20n.jsonl?x=1")
    assert planned(*urls) == {
        "sets/v1/a/0.tar.000": 0,
        "sets/v1/a/0.tar.001": 0,
        "sets/v1/m n.jsonl": None,
    }
    hub_url = "https://hf.co/datasets/a/b/resolve/main/x/0.tar"
    assert planned(hub_url, "https://h/x/1.tar").keys() == {"x/0.tar", "x/1.tar"}


def test_hostile_names_are_left_out(hub):
    names = ("good.tar", "a\n  out=b/x.tar", ".unfinished/a.tar", "a/../../outside.tar")
    hub.add("a/b", dict.fromkeys(names, b"x"))
    assert [*plan("--dataset=a/b", "--num_workers=1")] == ["good.tar"]


# --- Errors of the hub, waiting, the token -------------------------------------------------------


def test_errors_of_the_hub(hub, capsys, monkeypatch):
    hub.add("a/private", {"train.parquet": b"x"})
    hub.token = TOKEN
    flags = ("--dataset=a/private", "--num_workers=1")
    assert "private or gated repo" in error_of(capsys, *flags)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(plan(*flags)) == 1
    assert "Repository Not Found" in error_of(capsys, "--dataset=a/nothing")
    assert "a//b" in error_of(capsys, "--dataset=a//b")
    hub.failures["/api/"].append((403, {}))
    assert "403" in error_of(capsys, *flags)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline" in error_of(capsys, *flags)


def test_no_connection(hub, capsys, sleeps):
    hub.server.server_close()
    with pytest.raises(SystemExit) as stop:
        plan("--dataset=a/b")
    assert stop.value.code == 2 and sum(sleeps) < 60
    assert "error: [Errno 111] Connection refused" in capsys.readouterr().err


def test_command_line(hub, tmp_path):
    """A separate process with HF_ENDPOINT, HF_TOKEN for the hub only, 429."""
    hub.token = TOKEN
    shards = {f"default/train/{i:04d}.parquet": b"x" * (5 + i) for i in range(3)}
    hub.add("a/b", shards, CONVERTED)
    hub.failures["/api/"] = [(429, {"Retry-After": "1"})]
    code, out, err = run_script(hub, "--dataset=a/b", cwd=tmp_path, HF_TOKEN=TOKEN)
    assert code == 0, err
    assert (tmp_path / "plan" / WORKER_FILE).read_text() == "0\n"
    files = json.loads((tmp_path / "plan/manifest.json").read_text())["files"]
    assert len(parse_aria2_input(tmp_path / "plan/download-0.txt")) == len(files) == 3
    for _, path, headers in hub.requests:
        is_listing = path.startswith("/api/datasets/")
        assert (headers.get("authorization") == f"Bearer {TOKEN}") == is_listing, path
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 3
    assert TOKEN not in "".join([out, err, *written])


# --- --urls ------------------------------------------------------------------------------------


def test_urls(hub, tmp_path):
    sha256 = hashlib.sha256(b"x").hexdigest()
    lines = [
        "# shards",
        "http://h/a.parquet",
        "",
        "https://h/b.parquet?x=%20y#z\t123",
        f"  https://h/c.parquet  5   {sha256.upper()}  ",
        "http://h/a.parquet",
    ]
    list_file = tmp_path / "urls.txt"
    list_file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    files = plan("--urls", list_file, "--num_workers=2").values()
    assert parse_aria2_input("plan/download-0.txt") == [
        (None, "http://h/a.parquet", "a.parquet", None),
        (5, "https://h/c.parquet", "c.parquet", sha256),
    ]
    assert parse_aria2_input("plan/download-1.txt") == [
        (123, "https://h/b.parquet?x=%20y#z", "b.parquet", None)
    ]
    assert [file["size"] for file in files] == [None, 123, 5]
    assert hub.requests == []


@pytest.mark.parametrize(
    "line",
    [
        "h/b",
        "http://h/c ten",
        "http://h/d 5 abc",
        "https://me:secret@host/x.parquet",
    ],
)
def test_urls_that_are_refused(hub, tmp_path, capsys, line):
    list_file = tmp_path / "urls.txt"
    list_file.write_text(f"# a list\n{line}\n", encoding="utf-8")
    error = error_of(capsys, "--urls", list_file, "--num_workers=1")
    assert "urls.txt: line 2 is not URL [SIZE [SHA256]]" in error and "secret" not in error


# --- Workers -------------------------------------------------------------------------------------


@pytest.fixture
def shards(hub):
    hub.add("a/b", {f"data/train-{i:05d}-of-00040.parquet": 100 for i in range(40)})
    return hub


def own_part(capsys, *flags):
    """(worker index, number of workers), printed and written; all input files exist."""
    plan("--dataset=a/b", *flags)
    worker = int(Path("plan", WORKER_FILE).read_text())
    count = int(re.search(r"(\d+) workers", out := capsys.readouterr().out)[1])
    parts = {path.name for path in Path("plan").glob("download-*.txt")}
    assert parts == {f"download-{k}.txt" for k in range(count)}
    assert f"next, on worker {worker}: bash script.sh plan/download-{worker}.txt\n" in out
    Path("plan", WORKER_FILE).unlink()
    return worker, count


def test_worker_by_environment(shards, capsys, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0.svc,t-1.svc,t-2.svc,t-3.svc")
    assert own_part(capsys) == (2, 4)
    assert own_part(capsys, "--worker=1", "--num_workers=3") == (1, 3)
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "t-0:8471,t-1:8471,t-2:8471")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "3")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    assert own_part(capsys) == (5, 9)
    monkeypatch.setenv("TPU_WORKER_ID", "7")
    assert "--num_workers" in error_of(capsys, "--dataset=a/b")


def test_worker_by_metadata_server(shards, capsys):
    shards.attributes |= {
        "agent-worker-number": "5",
        "worker-network-endpoints": ",".join(f"unknown:unknown:10.0.0.{i}" for i in range(8)),
        "tpu-env": "ACCELERATOR_TYPE: 'v4-64'\nWORKER_ID: '5'\n",
    }
    assert own_part(capsys) == (5, 8)
    shards.attributes["tpu-env"] += "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    assert own_part(capsys) == (13, 16)


# --- Written files -------------------------------------------------------------------------------


def test_stale_parts_do_not_mislead(shards):
    """A new plan removes the input files of an older one."""
    plan("--dataset=a/b", "--num_workers=8")
    Path("plan/download-notes.txt").write_text("mine")
    plan("--dataset=a/b", "--num_workers=3", "--worker=1")
    names = {path.name for path in Path("plan").iterdir()}
    parts = {f"download-{k}.txt" for k in range(3)}
    assert names == {"manifest.json", "download-notes.txt", WORKER_FILE, *parts}
    plan("--dataset=a/b", "--num_workers=3", output_dir="fresh")
    for name in parts:
        assert Path("plan", name).read_bytes() == Path("fresh", name).read_bytes()


def test_files_appear_complete(shards, monkeypatch):
    """A failed write leaves the earlier plan unchanged."""
    plan("--dataset=a/b", "--num_workers=2")
    before = {path.name: path.read_bytes() for path in Path("plan").glob("[!.]*")}

    def fail(source, target):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SystemExit):
        plan("--dataset=a/b", "--num_workers=2", "--max_shards=1")
    assert {path.name: path.read_bytes() for path in Path("plan").glob("[!.]*")} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of the arguments --dataset --urls is required"),
        (["--dataset=a/b", "--urls=x"], "argument --urls: not allowed with argument --dataset"),
        (["--dataset=a/b", "--num_workers=-1"], "--num_workers"),
        (
            ["--dataset=a/b", "--worker=3", "--num_workers=3"],
            "--worker needs --num_workers above it",
        ),
        (["--dataset=a/b", "--worker=x"], "argument --worker: invalid int value: 'x'"),
        (["--dataset", "https://huggingface.co/datasets/a/b"], "Repo id must be in the form"),
    ],
)
def test_flags(hub, capsys, flags, message):
    assert message in error_of(capsys, *flags)
    assert not [path for path in hub.paths() if path.startswith("/api/")]


def test_an_output_that_is_a_file(shards, capsys):
    Path("plan").write_text("")
    with pytest.raises(SystemExit) as stop:
        plan("--dataset=a/b")
    assert stop.value.code == 2
    assert re.fullmatch("error: .*File exists: 'plan'.*\n", capsys.readouterr().err)


def test_interrupt(hub, tmp_path):
    """Ctrl-C ends the script at once with one line, even while it waits to retry."""
    hub.add("a/b", {"train.parquet": b"x"})
    hub.failures["/api/"] = [(429, {"Retry-After": "300"})] * 100
    with start_script(hub, "--dataset=a/b", cwd=tmp_path) as process:
        while "Waiting 30" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err == "interrupted; run the same command again\n"
    assert not (tmp_path / "plan").exists()
