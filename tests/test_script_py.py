"""script.py against a fake hub: listing, assignment to workers, written files."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, slow
from hub_server import hub_of_this_process, ways_to_give_a_token
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

import script
from diffusers_flax.data import remote_shards

TOKEN = "hf_tokenThatMustNotLeak"
PAPER = "timbrooks/instructpix2pix-clip-filtered"
WORKER_FILE = f"worker-{socket.gethostname()}"  # contains this host's worker index


def parquet(num_rows=3, row_group_size=2, **columns):
    """The bytes of a small parquet file."""
    columns = columns or {"edit": pa.array(["turn it"] * num_rows)}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, row_group_size=row_group_size)
    return buffer.getvalue()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake hub for script.py in this process, an empty working directory and no TPU."""
    with hub_of_this_process(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def sleeps(monkeypatch):
    """Record calls of time.sleep instead of sleeping."""
    waits = []
    monkeypatch.setattr(remote_shards.time, "sleep", waits.append)
    return waits


def plan(*flags, output_dir="plan"):
    """Run script.py in this process and return the files of the manifest."""
    script.main([*map(str, flags), f"--output_dir={output_dir}"])
    return json.loads(Path(output_dir, "manifest.json").read_text())["files"]


def error_of(capsys, *flags):
    """Run script.py, which must fail, and return its one error line, without progress."""
    with pytest.raises(SystemExit) as exit_info:
        plan(*flags)
    assert exit_info.value.code == 2
    progress = re.compile(r"|footers: .*|.*retrying in \d+ s")
    lines = [x for x in capsys.readouterr().err.splitlines() if not progress.fullmatch(x)]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def parse_aria2_input(path):
    """Parse an aria2 input file strictly: [(size, url, out, sha256)]."""
    entry = re.compile(
        r"(?:# size=(\d+)\n)?(http\S+)\n  out=(\S+)\n(?:  checksum=sha-256=([0-9a-f]{64})\n)?"
    )
    text = Path(path).read_text()
    assert entry.sub("", text) == "" or text.startswith("# no shards"), text
    return [
        (int(size) if size else None, url, out, sha256 or None)
        for size, url, out, sha256 in entry.findall(text)
    ]


def start_script(hub, *flags, cwd, **env):
    """Start script.py in a separate process with a clean environment."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TPU_", "MEGASCALE_", "SLURM_", "OMPI_"))
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


@pytest.mark.parametrize("num_workers", [7, *slow(3, 4, 8, 16, 64)])
def test_near_equal_shards(hub, num_workers):
    """262 shards of 489 to 504 MB: disjoint, complete, within one shard of the mean, and the same
    on every host except for the file with the worker index."""
    sizes = [489_000_000 + 7919 * 1893 * i % 15_000_000 for i in range(262)]
    hub.add(PAPER, {f"data/train-{i:05d}-of-00262-{i:08x}.parquet": n for i, n in enumerate(sizes)})
    files = plan("--dataset", PAPER, "--num_workers", num_workers)
    assert [file["size"] for file in files] == sizes
    parts = [parse_aria2_input(f"plan/download-{k}.txt") for k in range(num_workers)]
    assert Counter(entry[1] for part in parts for entry in part) == Counter(
        file["url"] for file in files
    )
    loads = [sum(entry[0] for entry in part) for part in parts]
    assert max(loads) <= sum(sizes) / num_workers + max(sizes)
    assert max(loads) - min(loads) <= max(sizes)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1

    written = {path.name: path.read_bytes() for path in Path("plan").iterdir()}
    for k in {0, num_workers // 2, num_workers - 1}:
        plan("--dataset", PAPER, "--num_workers", num_workers, "--worker", k, output_dir=f"of{k}")
        by_k = {path.name: path.read_bytes() for path in Path(f"of{k}").iterdir()}
        assert by_k == written | {WORKER_FILE: b"%d\n" % k}


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.none() | st.integers(1, 10**12), max_size=80),
    st.integers(1, 70),
)
def test_deal_random_sizes(sizes, num_workers):
    workers = script.assign_workers(sizes, num_workers)
    assert workers == script.assign_workers(list(sizes), num_workers)
    assert len(workers) == len(sizes) and set(workers) <= set(range(num_workers))
    known = [size for size in sizes if size is not None]
    mean = sum(known) // len(known) if known else 1
    weights = [mean if size is None else size for size in sizes]
    loads = [
        sum(weight for weight, worker in zip(weights, workers) if worker == k)
        for k in range(num_workers)
    ]
    largest = max(weights, default=0)
    assert max(loads) <= sum(weights) / num_workers + largest
    # Larger shards come first; each goes to the first of the least loaded workers.
    loads = [0] * num_workers
    for weight, _, worker in sorted(
        (-weight, i, worker) for i, (weight, worker) in enumerate(zip(weights, workers))
    ):
        assert worker == loads.index(min(loads))
        loads[worker] -= weight


@given(st.integers(0, 300), st.integers(1, 70), st.none() | st.integers(1, 10**9))
def test_deal_equal_sizes(num_shards, num_workers, size):
    counts = Counter(script.assign_workers([size] * num_shards, num_workers))
    counts = [counts[k] for k in range(num_workers)]
    assert sum(counts) == num_shards and max(counts) - min(counts) <= 1


def test_deal_by_hand():
    """Largest first to the least loaded worker; ties keep their order."""
    assert script.assign_workers([5, 9, 5, 5, 1], 2) == [1, 0, 1, 0, 1]
    assert script.assign_workers([4, None, 2], 2) == [0, 1, 1]  # the unknown size counts as 3


# --- Listing -----------------------------------------------------------------------------------


def test_converted_listing(hub, capsys):
    """A complete conversion is preferred; pagination works; sizes and checksums are the hub's."""
    shards = {f"default/train/{i:04d}.parquet": parquet(i + 1) for i in range(60)}
    hub.add("a/b", shards | {"default/test/0000.parquet": parquet()}, remote_shards.CONVERTED_REF)
    hub.add("a/b", {"data/train-00000-of-00001.parquet": parquet()})
    files = plan("--dataset=a/b", "--num_workers=1")
    assert [file["file"] for file in files] == [path.replace("/", "-") for path in sorted(shards)]
    for file, (path, content) in zip(files, sorted(shards.items())):
        url = f"{hub.endpoint}/datasets/a/b/resolve/refs%2Fconvert%2Fparquet/{path}"
        sha256 = hashlib.sha256(content).hexdigest()
        assert file == {
            "url": url,
            "file": path.replace("/", "-"),
            "size": len(content),
            "sha256": sha256,
            "rows": None,
            "worker": 0,
        }
    expected = [(file["size"], file["url"], file["file"], file["sha256"]) for file in files]
    assert parse_aria2_input("plan/download-0.txt") == expected
    assert len(hub.requests) == 3  # the repository, and two pages of the conversion
    out = capsys.readouterr().out
    assert "60 shards" in out and "conversion" in out
    assert "bash script.sh plan/download-0.txt data" in out
    assert len(plan("--dataset=a/b", "--num_workers=1", "--split=test")) == 1


@pytest.mark.parametrize(
    "converted",
    [
        {"default/partial-train/0000.parquet": b"x"},
        {"default/train/partial/0000.parquet": b"x"},
        {"default/train/0000.parquet": b"x", "default/partial-train/0000.parquet": b"y"},
        {"default/partial-train-part0/0000.parquet": b"x"},
    ],
)
def test_partial_conversion_is_not_used(hub, capsys, converted):
    hub.add("a/b", converted, remote_shards.CONVERTED_REF)
    hub.add("a/b", {"data/train-00000-of-00001-abc.parquet": parquet(), "README.md": b""})
    (file,) = plan("--dataset=a/b", "--num_workers=1")
    assert (
        file["url"]
        == f"{hub.endpoint}/datasets/a/b/resolve/main/data/train-00000-of-00001-abc.parquet"
    )
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("using"))
    assert "only the first part" in line and "files (main)" in line

    hub.trees["a/b", "main"] = {"train.csv": b"x"}
    error = error_of(capsys, "--dataset=a/b", "--num_workers=1")
    assert "only the first part" in error and "1 .csv" in error and "--urls" in error
    assert "default" in error


def test_many_converted_parts(hub):
    """The hub splits more than 10000 files into several directories."""
    paths = [f"en/train-part{k}/{i:04d}.parquet" for k in (0, 1) for i in (0, 1)]
    hub.add("a/b", dict.fromkeys(paths, 7), remote_shards.CONVERTED_REF)
    files = plan("--dataset=a/b", "--num_workers=1")
    assert [urlsplit(file["url"]).path.split("parquet/", 1)[1] for file in files] == paths
    assert [file["sha256"] for file in files] == [
        None
    ] * 4  # the hub has no checksums of small files


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("data/train-00000-of-00262-04567e4fa3e84c1c.parquet", ("default", "train")),
        ("train.parquet", ("default", "train")),
        ("0003.parquet", ("default", "train")),
        ("some images.parquet", ("default", "train")),
        ("train/0000.parquet", ("default", "train")),
        ("data/test/part-0-of-9.parquet", ("default", "test")),
        ("en/train-00000-of-00002.parquet", ("en", "train")),
        ("en/validation/x.snappy.parquet", ("en", "validation")),
        ("data/en/validation-1.parquet", ("en", "validation")),
        ("data/holdout-00000-of-00001.parquet", ("default", "holdout")),
        ("imagenet-train-00000-of-01024.parquet", ("default", "train")),
        ("a/b/x.parquet", ("a/b", "train")),
        (".cache/train.parquet", None),
        ("data/.hidden.parquet", None),
        ("train.csv", None),
    ],
)
def test_layouts(path, where):
    assert remote_shards.classify_original(path) == where


def test_configs_and_splits(hub, capsys):
    own = {
        "en/train-00000-of-00001.parquet": 10,
        "en/test-00000-of-00001.parquet": 11,
        "de/train-00000-of-00001.parquet": 12,
    }
    hub.add("a/b", own)
    flags = ("--dataset=a/b", "--num_workers=1")
    error = error_of(capsys, *flags)
    assert "--config" in error and "de, en" in error
    assert [file["size"] for file in plan(*flags, "--config=de")] == [12]
    assert [file["size"] for file in plan(*flags, "--config=en", "--split=test")] == [11]
    assert "no split dev" in (error := error_of(capsys, *flags, "--config=en", "--split=dev"))
    assert "test, train" in error
    assert "no configuration fr" in (error := error_of(capsys, *flags, "--config=fr"))
    assert "de, en" in error

    hub.add("a/b", {"train.parquet": 13})
    assert [file["size"] for file in plan(*flags)] == [13]  # "default" among several configurations

    # With several converted configurations the repository's files are no fallback.
    hub.add("c/d", {"train.parquet": 1})
    hub.add(
        "c/d", {"x/train/0000.parquet": 2, "y/train/0000.parquet": 3}, remote_shards.CONVERTED_REF
    )
    assert "x, y" in error_of(capsys, "--dataset=c/d", "--num_workers=1")


def test_revision(hub, capsys):
    """--revision selects repository files and is quoted in the URL; only main is converted."""
    hub.add("a/b", {"default/train/0000.parquet": 1}, remote_shards.CONVERTED_REF)
    hub.add("a/b", {"train.parquet": 2}, "refs/pr/1")
    (file,) = plan("--dataset=a/b", "--num_workers=1", "--revision=refs/pr/1")
    assert file["url"].endswith("/resolve/refs%2Fpr%2F1/train.parquet") and file["size"] == 2
    assert "--revision refs/pr/1" in capsys.readouterr().out
    assert "no such revision" in error_of(capsys, "--dataset=a/b", "--revision=v9")


def test_incomplete_upload_is_told(hub, capsys):
    hub.add("a/b", {f"data/train-{i:05d}-of-00004-ab.parquet": 5 for i in range(3)})
    plan("--dataset=a/b", "--num_workers=1")
    assert "3 shards, but their names announce 4" in capsys.readouterr().err


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
        hub.add(name, dict.fromkeys([*paths, "README.md"], parquet()))

    def planned(name, *flags):
        files = plan("--dataset", name, *flags)
        return [file["url"].partition("/resolve/main/")[2] for file in files]

    assert planned("osunlp/MagicBrush") == magic
    assert planned("osunlp/MagicBrush", "--split", "dev") == magic_dev
    assert planned("TIGER-Lab/OmniEdit-Filtered-1.2M") == omni[2:]
    assert planned("BleachNick/UltraEdit", "--split", "FreeForm_*") == ultra
    assert planned("BleachNick/UltraEdit", "--split", "FreeForm_[01]") == ultra[:4]
    assert planned("BleachNick/UltraEdit_Region_Based_100k", "--split", "RegionBase") == regions
    assert "warning" not in capsys.readouterr().err
    error = error_of(capsys, "--dataset", "BleachNick/UltraEdit")
    assert "no split train in configuration default, but FreeForm_0, FreeForm_1" in error
    # The hub's conversion has the first part of a set only.
    converted = {"default/partial-train/0000.parquet": parquet()}
    hub.add("osunlp/MagicBrush", converted, remote_shards.CONVERTED_REF)
    assert planned("osunlp/MagicBrush") == planned("osunlp/MagicBrush", "--split", "t*n") == magic


def test_names_do_not_collide(hub, tmp_path):
    hub.add("a/b", {"data/x-y/train.parquet": 1, "data/x/y-train.parquet": 2})
    rows = plan("--dataset=a/b", "--num_workers=1", "--config=x-y")
    assert [row["file"] for row in rows] == ["data-x-y-train.parquet"]
    names = remote_shards.unique_file_names(
        [
            "https://h/datasets/a/b/resolve/main/data/x-y/train.parquet",
            "https://h/datasets/a/b/resolve/main/data/x/y-train.parquet",
        ]
    )
    assert names == ["00000-data-x-y-train.parquet", "00001-data-x-y-train.parquet"]
    urls = [
        "http://one/0000.parquet",
        "http://two/0000.parquet?x=1",
        "http://two/00000-0000.parquet",
        "http://three/..%2F.unfinished",
        "http://three/",
        "http://three/%20-o/" + 300 * "x" + ".parquet",
    ]
    names = remote_shards.unique_file_names(urls)
    assert len(set(names)) == len(urls)
    assert all(re.fullmatch(r"[A-Za-z0-9_][\w.-]{0,230}\.parquet", name) for name in names), names
    assert remote_shards.unique_file_names(urls[3:5]) == ["unfinished.parquet", "shard.parquet"]
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    files = plan("--urls", tmp_path / "urls.txt", "--num_workers=1", "--max_shards=2")
    assert [file["file"] for file in files] == names[:2]


# --- Errors of the hub, waiting, the token -------------------------------------------------------


def test_access_errors(hub, capsys, monkeypatch):
    hub.add("a/private", {"train.parquet": parquet()})
    hub.add("a/gated", {"train.parquet": parquet()})
    hub.token, hub.gated = TOKEN, {"a/gated"}
    assert "HF_TOKEN" in error_of(capsys, "--dataset=a/private")
    assert len(plan("--dataset=a/gated", "--num_workers=1")) == 1  # the listing is public
    error = error_of(capsys, "--dataset=a/gated", "--num_workers=1", "--columns")
    assert "ask for access" in error and "HF_TOKEN" in error
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert plan("--dataset=a/gated", "--num_workers=1", "--columns")[0]["rows"] == 3
    assert len(plan("--dataset=a/private", "--num_workers=1")) == 1
    assert "no such dataset" in error_of(capsys, "--dataset=a/nothing")
    assert "a//b" in error_of(capsys, "--dataset=a//b")
    for status in (401, 403, 404, 410):
        hub.failures["/api/"].append((status, {}))
        assert f"HTTP {status}" in error_of(capsys, "--dataset=a/private")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in error_of(capsys, "--dataset=a/private")


def test_waiting(hub, capsys, sleeps):
    """Waits follow Retry-After (seconds or date) or RateLimit, else they double."""
    hub.add("a/b", {"default/train/0000.parquet": 1}, remote_shards.CONVERTED_REF)
    hub.failures["/api/datasets/a/b/tree/refs"] += [
        (429, {"Retry-After": "7"}),
        (429, {"Retry-After": formatdate(time.time() + 40, usegmt=True)}),
        (
            429,
            {"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'},
        ),
        (503, {"Retry-After": "0"}),
        (503, {}),
        (429, {"Retry-After": "soon"}),
    ]
    assert len(plan("--dataset=a/b", "--num_workers=1")) == 1
    assert [sleeps[0], *sleeps[2:4]] == [7, 56, 1]
    assert 35 <= sleeps[1] <= 40
    # Unrequested waits double from 1 s, independent of requested ones.
    assert sleeps[4:] == [1, 2]
    err = capsys.readouterr().err
    assert "HTTP 429; retrying in 7 s" in err and "HTTP 503; retrying in 1 s" in err
    assert len(hub.requests) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "least", "most"),
    [
        ((429, {"Retry-After": "250"}), 500, 500),
        ((429, {"Retry-After": "86400"}), 0, 0),
        ((429, {"Retry-After": "0"}), 600, 600),
        ((503, {}), 45, 60),
    ],
)
def test_waiting_is_bounded(hub, capsys, sleeps, failure, least, most):
    hub.add("a/b", {"train.parquet": 1})
    hub.failures["/api/"] = [failure] * 1000
    error = error_of(capsys, "--dataset=a/b")
    assert f"HTTP {failure[0]}" in error and "later" in error
    assert least <= sum(sleeps) <= most
    assert not Path("plan").exists()


def test_no_connection(hub, capsys, sleeps, monkeypatch):
    hub.server.server_close()
    assert "refused" in error_of(capsys, "--dataset=a/b")
    assert 45 <= sum(sleeps) <= 60
    monkeypatch.setattr(constants, "ENDPOINT", "huggingface.co")
    assert "HF_ENDPOINT" in error_of(capsys, "--dataset=a/b")


def test_not_a_hub(hub, capsys):
    hub.failures["/api/"] = [(200, {})]
    assert "HF_ENDPOINT" in error_of(capsys, "--dataset=a/b")


def test_illegal_token_is_not_quoted(hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\x0b{TOKEN}")
    error = error_of(capsys, "--dataset=a/b")
    assert "HF_TOKEN" in error and TOKEN not in error


def test_passwords_stay_out_of_the_plan(hub, capsys, tmp_path):
    (tmp_path / "urls.txt").write_text("https://me:secret@host/x.parquet\n")
    error = error_of(capsys, "--urls", tmp_path / "urls.txt", "--num_workers=1")
    assert "password" in error and "secret" not in error
    assert not Path("plan").exists()


def test_command_line(hub, tmp_path):
    """A separate process with HF_ENDPOINT, HF_TOKEN for the hub only, 429, 503, redirects."""
    hub.token = TOKEN
    hub.add(
        "a/b",
        {f"default/train/{i:04d}.parquet": parquet(5 + i) for i in range(3)},
        remote_shards.CONVERTED_REF,
    )
    hub.failures["/api/"] = [(429, {"Retry-After": "1"})]
    hub.failures["/cdn/"] = [(503, {})]
    code, out, err = run_script(hub, "--dataset=a/b", "--columns", cwd=tmp_path, HF_TOKEN=TOKEN)
    assert code == 0, err
    assert "HTTP 429; retrying in 1 s" in err
    assert "HTTP 503; retrying in 1 s" in err
    assert "18 rows, 10 row groups of 1 to 2 rows" in out
    assert (
        "workers: 1 (by default)" in out and (tmp_path / "plan" / WORKER_FILE).read_text() == "0\n"
    )
    files = json.loads((tmp_path / "plan/manifest.json").read_text())["files"]
    assert [file["rows"] for file in files] == [5, 6, 7]
    for file in files:
        assert file["url"].startswith(f"{hub.endpoint}/datasets/a/b/resolve/")
    assert parse_aria2_input(tmp_path / "plan/download-0.txt") == [
        (file["size"], file["url"], file["file"], file["sha256"]) for file in files
    ]

    seen = Counter()
    for host, path, headers in hub.requests:
        is_hub = path.startswith(("/api/", "/datasets/"))
        assert (headers.get("authorization") == f"Bearer {TOKEN}") == is_hub, path
        assert is_hub or TOKEN not in str(headers)
        seen[path.split("/")[1], host] += 1
    assert seen["api", "127.0.0.1"] == 3
    assert seen["cdn", "localhost"] == seen["datasets", "127.0.0.1"] == 4
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 3
    for text in [out, err, *written]:
        assert TOKEN not in text and "SECRET" not in text

    code, out, err = run_script(hub, "--dataset=a/b", cwd=tmp_path)  # no token
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: a/b: .*HF_TOKEN.*\n", err)


@pytest.mark.slow
def test_every_way_to_give_a_token(hub, tmp_path):
    """As in script.sh, see the test of the same name."""
    hub.token = TOKEN
    hub.add("a/b", {"default/train/0000.parquet": parquet()}, remote_shards.CONVERTED_REF)
    for name, env in ways_to_give_a_token(tmp_path, TOKEN).items():
        env |= {"HF_ENDPOINT": f"{hub.endpoint}//"}
        flags = ["--dataset=a/b", "--worker=0", "--num_workers=1"]  # without JAX
        code, out, err = run_script(hub, *flags, cwd=tmp_path, **env)
        assert code == 0, (name, err)
        plan_files = [path.read_text() for path in (tmp_path / "plan").iterdir()]
        assert TOKEN not in "".join([out, err, *plan_files])


# --- --urls ------------------------------------------------------------------------------------


def test_urls(hub, tmp_path, capsys):
    sha256 = hashlib.sha256(b"x").hexdigest()
    lines = [
        "# shards",
        "http://h/a.parquet",
        "",
        "https://h/b.parquet?x=%20y#z\t123",
        f"  https://h/c.parquet  5   {sha256.upper()}  ",
    ]
    list_file = tmp_path / "urls.txt"
    list_file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    files = plan("--urls", list_file, "--num_workers=2")
    assert parse_aria2_input("plan/download-0.txt") == [
        (123, "https://h/b.parquet?x=%20y#z", "b.parquet", None)
    ]
    assert parse_aria2_input("plan/download-1.txt") == [
        (None, "http://h/a.parquet", "a.parquet", None),
        (5, "https://h/c.parquet", "c.parquet", sha256),
    ]
    assert [file["worker"] for file in files] == [1, 0, 1]
    assert [file["size"] for file in files] == [None, 123, 5]
    assert "1 of unknown size" in capsys.readouterr().out
    assert hub.requests == []

    bad = ["http://h/a", "h/b", "http://h/c 0", "http://h/d 5 abc", "http://h/a 5", "http://h/é"]
    list_file.write_text("\n".join([*bad, "http://h/ok 5 # five"]), encoding="utf-8")
    error = error_of(capsys, "--urls", list_file, "--num_workers=1")
    assert re.findall(r"line (\d) is not", error) == ["2", "3", "4", "7"]
    assert "line 5 repeats line 1" in error
    assert "line 6 has letters outside of ASCII; write them as %XX" in error
    list_file.write_text("http://[::1/a\nhttp://h:99999/a\nhttp:///a\n")
    assert error_of(capsys, "--urls", list_file).endswith(
        "urls.txt: line 1: Invalid IPv6 URL; line 2: Port out of range 0-65535; "
        "line 3: no host, or port 0"
    )
    list_file.write_text("no address\n" * 13, encoding="utf-8")
    error = error_of(capsys, "--urls", list_file, "--num_workers=1")
    assert error.count("is not") == 10 and error.endswith("; and 3 more")
    for separator in "\x0b\x0c\x1c\x1d\x1e\x85\u2028":  # only a newline ends a line
        list_file.write_text(f"#{separator}http://h/a\nhttp://h/b{separator}http://h/c\n", "utf-8")
        error = error_of(capsys, "--urls", list_file, "--num_workers=1")
        assert re.findall(r"line (\d) ", error) == ["2"]
    list_file.write_bytes(b"http://h/\xff\n")
    error = error_of(capsys, "--urls", list_file, "--num_workers=1")
    assert "urls.txt is not UTF-8" in error
    list_file.write_text("# nothing\n")
    assert "lists no addresses" in error_of(capsys, "--urls", list_file, "--num_workers=1")
    assert "missing.txt" in error_of(capsys, "--urls", "missing.txt", "--num_workers=1")


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--dataset", "https://huggingface.co/datasets/a/b"), "--dataset https://.* OWNER/NAME"),
        (("--dataset", "a/b c"), "--dataset a/b c is no name of a dataset on the hub; .*/NAME"),
        (("--dataset", ""), "--dataset is no name of a dataset on the hub; write OWNER/NAME"),
    ],
)
def test_a_name_that_no_dataset_has(hub, capsys, flags, message):
    assert re.fullmatch(f"error: {message}", error_of(capsys, *flags, "--num_workers=1"))
    assert hub.requests == []


# --- --columns -----------------------------------------------------------------------------------


def test_columns(hub, tmp_path, capsys, monkeypatch):
    """Rows, types, row groups, missing sizes, and footers longer than the first request."""
    image = pa.array(
        [{"bytes": b"x" * 100, "path": None}] * 7,
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    wide = {f"column_{i}_{'x' * 50}": pa.array([i] * 2) for i in range(700)}
    contents = {
        "0.parquet": parquet(row_group_size=5, edit=pa.array(["a"] * 7), image=image),
        "1.parquet": parquet(row_group_size=3, edit=pa.array(["b"] * 7), image=image),
        "2.parquet": parquet(**wide),
    }
    assert int.from_bytes(contents["2.parquet"][-8:-4], "little") > remote_shards.FOOTER_BYTES
    hub.add("x/y", contents, "z")
    list_file = tmp_path / "urls.txt"
    urls = [f"{hub.endpoint}/plain/x/y/z/{name}" for name in contents]
    urls[1] = urls[1].replace("127.0.0.1", "localhost")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    list_file.write_text("\n".join(urls))
    files = plan("--urls", list_file, "--num_workers=3", "--columns")
    assert [file["rows"] for file in files] == [7, 7, 2]
    assert [file["size"] for file in files] == [len(content) for content in contents.values()]
    out = capsys.readouterr().out
    assert "16 rows, 6 row groups of 1 to 5 rows" in out and "not all have the same" in out
    assert "columns of 2 shards (0.parquet, 1.parquet):\n  edit: string\n" in out
    assert "  image: struct<bytes: binary, path: string>\n" in out
    assert len(hub.paths()) == 4  # one more request for the long footer
    ranges = [headers["range"] for _, _, headers in hub.requests]
    assert ranges.count("bytes=-65536") == 3
    got_token = {(host, "authorization" in headers) for host, _, headers in hub.requests}
    assert got_token == {("127.0.0.1", True), ("localhost", False)}

    sizes = [len(content) for content in contents.values()]
    list_file.write_text(f"{urls[0]} {sizes[0]}\n{urls[1]} {sizes[1] + 1}")
    error = error_of(capsys, "--urls", list_file, "--num_workers=1", "--columns")
    assert "1.parquet" in error and str(sizes[1]) in error and "0.parquet" not in error


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 1000, parquet()[:-1], b"PAR1\xff\xff\xff\xffPAR1", b"PAR1" * 1000],
)
def test_columns_of_a_broken_shard(hub, tmp_path, capfd, content):
    hub.add("x/y", {"good.parquet": parquet(), "bad.parquet": content}, "z")
    list_file = tmp_path / "urls.txt"
    list_file.write_text(
        "".join(f"{hub.endpoint}/plain/x/y/z/{name}.parquet\n" for name in ("good", "bad"))
    )
    with pytest.raises(SystemExit):
        plan("--urls", list_file, "--num_workers=1", "--columns")
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and "/bad.parquet is not a parquet file" in error
    assert not Path("plan").exists()


def test_columns_without_ranges(hub, tmp_path, capsys):
    """A server without range requests is refused, unless the files are small."""
    big = parquet(x=pa.array([os.urandom(200_000)]))
    hub.add("x/y", {"0.parquet": parquet(), "1.parquet": big}, "z")
    hub.ranges = False
    list_file = tmp_path / "urls.txt"
    list_file.write_text(f"{hub.endpoint}/plain/x/y/z/0.parquet")
    (file,) = plan("--urls", list_file, "--num_workers=1", "--columns")
    assert (file["rows"], file["size"]) == (3, len(parquet()))
    list_file.write_text(f"{hub.endpoint}/plain/x/y/z/1.parquet")
    with pytest.raises(SystemExit):
        plan("--urls", list_file, "--num_workers=1", "--columns")
    assert "no range requests" in capsys.readouterr().err


# --- Workers -------------------------------------------------------------------------------------


@pytest.fixture
def shards(hub):
    hub.add("a/b", {f"data/train-{i:05d}-of-00040.parquet": 100 + i for i in range(40)})
    return hub


def own_part(capsys, *flags):
    """(worker index, number of workers), printed and written; all input files exist."""
    plan("--dataset=a/b", *flags)
    worker = int(Path("plan", WORKER_FILE).read_text())
    count = int(re.search(r"workers: (\d+)", out := capsys.readouterr().out)[1])
    parts = {path.name for path in Path("plan").glob("download-*.txt")}
    assert parts == {f"download-{k}.txt" for k in range(count)}
    path = f"plan/download-{worker}.txt"
    assert f"worker {worker}, {len(parse_aria2_input(path))} shards" in out
    assert f"bash script.sh {path} data" in out
    Path("plan", WORKER_FILE).unlink()
    return worker, count


def test_worker_by_environment(shards, capsys, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0.svc,t-1.svc,t-2.svc,t-3.svc")
    assert own_part(capsys) == (2, 4)
    assert own_part(capsys, "--worker=1", "--num_workers=3") == (1, 3)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "3")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    assert own_part(capsys) == (6, 12)
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "t-0:8471,t-1:8471,t-2:8471")
    assert own_part(capsys) == (5, 9)
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    assert "--num_workers" in error_of(capsys, "--dataset=a/b", "--max_shards=1")
    monkeypatch.setenv("TPU_WORKER_ID", "none")
    assert "--num_workers" in error_of(capsys, "--dataset=a/b", "--max_shards=1")


def test_worker_by_metadata_server(shards, capsys):
    shards.attributes |= {
        "agent-worker-number": "5",
        "worker-network-endpoints": ",".join(f"unknown:unknown:10.0.0.{i}" for i in range(8)),
        "tpu-env": "ACCELERATOR_TYPE: 'v4-64'\nWORKER_ID: '5'\n",
    }
    assert own_part(capsys) == (5, 8)
    shards.attributes["tpu-env"] += "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    assert own_part(capsys) == (13, 16)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["Slurm", "Open MPI"])
def test_worker_by_launcher(shards, tmp_path, launcher):
    """Two tasks agree; a process outside of the launcher is an error without a plan."""
    names = {
        "Slurm": ("SLURM_NTASKS", "SLURM_PROCID"),
        "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    }
    count, index = names[launcher]
    flags = ("--dataset=a/b", "--max_shards=5")
    for k in range(2):
        (cwd := tmp_path / f"host{k}").mkdir()
        env = {count: "2", index: str(k), "SLURM_STEP_NODELIST": "localhost"}
        code, out, err = run_script(shards, *flags, cwd=cwd, **env)
        assert code == 0, err
        assert f"workers: 2 (by {launcher})" in out and f"worker {k}, " in out
        assert (cwd / "plan" / WORKER_FILE).read_text() == f"{k}\n"

    code, out, err = run_script(shards, *flags, cwd=tmp_path, **{count: "2"})
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {launcher} has 2 tasks and this process is none of them; ")


def test_runs_without_jax(shards, tmp_path, monkeypatch):
    shutil.copy(ROOT / "script.py", tmp_path)
    (tmp_path / "jax.py").write_text("raise ImportError('jax is imported')")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    code, _, err = run_script(shards, "--dataset=a/b", "--max_shards=2", cwd=tmp_path)
    assert code == 0, err
    assert (tmp_path / "plan" / "download-0.txt").exists()


def test_num_workers_alone_notes_no_worker(shards, capsys):
    for num_workers in (4, 1):  # no worker index of an earlier plan remains
        plan("--dataset=a/b", "--num_workers=4", "--worker=3")
        assert Path("plan", WORKER_FILE).read_text() == "3\n"
        plan("--dataset=a/b", f"--num_workers={num_workers}")
        assert not Path("plan", WORKER_FILE).exists()


def test_columns_do_not_change_who_gets_what(hub, tmp_path):
    """Plans with and without --columns agree, though only one knows the sizes."""
    contents = {f"{i}.parquet": parquet(x=pa.array([os.urandom(9000 >> i)])) for i in range(5)}
    hub.add("x/y", contents, "z")
    (tmp_path / "urls.txt").write_text(
        "".join(f"{hub.endpoint}/plain/x/y/z/{name}\n" for name in contents)
    )
    flags = ("--urls", tmp_path / "urls.txt", "--num_workers=2")
    plain, found_out = plan(*flags), plan(*flags, "--columns")
    assert [file["worker"] for file in found_out] == [file["worker"] for file in plain]
    sizes = [file["size"] for file in found_out]
    assert sizes == [len(content) for content in contents.values()]
    assert script.assign_workers(sizes, 2) != [file["worker"] for file in plain], (
        "the test shows nothing"
    )


@pytest.mark.parametrize(
    ("num_shards", "num_workers", "percent"),
    [
        (3, 5, 100),
        (3, 2, 33),
        (20, 3, 10),
        (19, 18, 5),
        (21, 20, None),
        (40, 3, None),
        (1, 1, None),
    ],
)
def test_unequal_parts_are_told(shards, capsys, num_shards, num_workers, percent):
    plan("--dataset=a/b", f"--num_workers={num_workers}", f"--max_shards={num_shards}")
    texts = [Path(f"plan/download-{k}.txt").read_text() for k in range(num_workers)]
    counts = [text.count("http") for text in texts]
    assert sum(counts) == num_shards
    for text, count in zip(texts, counts):
        assert count or (text.startswith("# ") and text.count("\n") == 1)
    lines = capsys.readouterr().err.splitlines()
    if percent is None:
        assert lines == []
    else:
        assert len(lines) == 1 and f" about {percent}% of the rows" in lines[0]
        assert "--num_workers 1 on every worker" in lines[0]


def test_max_shards_are_the_first(shards):
    files = plan("--dataset=a/b", "--num_workers=3", "--max_shards=7")
    assert [file["size"] for file in files] == [100 + i for i in range(7)]
    assert sum(len(parse_aria2_input(path)) for path in Path("plan").glob("download-*")) == 7


def test_stale_parts_do_not_mislead(shards, capsys):
    """A new plan removes the input files of an older one."""
    plan("--dataset=a/b", "--num_workers=8")
    Path("plan/download-notes.txt").write_text("mine")
    plan("--dataset=a/b", "--num_workers=3", "--worker=1")
    assert "removed plan/download-7.txt" in capsys.readouterr().out
    names = {path.name for path in Path("plan").iterdir()}
    assert names == {
        "manifest.json",
        "download-notes.txt",
        WORKER_FILE,
        *(f"download-{k}.txt" for k in range(3)),
    }
    plan("--dataset=a/b", "--num_workers=3", output_dir="fresh")
    for k in range(3):
        name = f"download-{k}.txt"
        assert Path("plan", name).read_bytes() == Path("fresh", name).read_bytes()


def test_files_appear_complete(shards, monkeypatch):
    """A failed write leaves the earlier plan unchanged."""
    plan("--dataset=a/b", "--num_workers=2")
    before = {path.name: path.read_bytes() for path in Path("plan").iterdir()}

    def fail(source, target):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SystemExit):
        plan("--dataset=a/b", "--num_workers=2", "--max_shards=1")
    assert {path.name: path.read_bytes() for path in Path("plan").iterdir()} == before


def test_flags(hub, tmp_path, capsys):
    assert "one of --dataset" in error_of(capsys)
    assert "one of --dataset" in error_of(capsys, "--dataset=a/b", "--urls=x")
    assert "--urls excludes" in error_of(capsys, "--urls=x", "--revision=v1")
    assert "--urls excludes" in error_of(capsys, "--urls=x", "--split=test")
    assert "--urls FILE, not both" in error_of(capsys, "--urls=x", "--dataset=a/b")
    assert "--num_workers 0" in error_of(capsys, "--dataset=a/b", "--num_workers=0")
    assert "--max_shards -1" in error_of(capsys, "--dataset=a/b", "--max_shards=-1")
    for flags, message in (
        (["--worker=0"], "--worker 0 needs the number of workers; also give --num_workers"),
        (["--worker=3", "--num_workers=3"], "--worker 3 must be from 0 to 2"),
        (["--worker=-1", "--num_workers=2"], "--worker -1 must be from 0 to 1"),
    ):
        assert message in error_of(capsys, "--dataset=a/b", *flags)
    (tmp_path / "work/plan").write_text("")
    assert "is a file" in error_of(capsys, "--dataset=a/b")
    assert hub.requests == []
    (tmp_path / "work/plan").unlink()
    assert "--urls nowhere cannot be read: No such file" in error_of(capsys, "--urls=nowhere")


def test_interrupt(hub, tmp_path):
    """Ctrl-C ends the script at once with one line, even while threads wait to retry."""
    hub.add("a/b", {f"{i}.parquet": parquet() for i in range(20)})
    hub.failures["/cdn/"] = [(429, {"Retry-After": "300"})] * 100
    with start_script(hub, "--dataset=a/b", "--columns", cwd=tmp_path) as process:
        while "retrying in 300 s" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "interrupted; run the same command again" in err.splitlines()
    assert "Traceback" not in err and not (tmp_path / "plan").exists()
