"""parquet_processing.py --pairs with archives: every known set, kills, held-out pairs, faults."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from edit_sets import (
    SETS,
    grey_of,
    make_set,
    manifest_of,
    num_left_out,
    pairs_of,
    read_shards,
    refuse,
    run,
    write_lines,
    write_tar,
)
from known_sets import plain
from PIL import Image
from shards import encode, smooth

import parquet_processing
from diffusers_flax.data import writing
from diffusers_flax.data.archives import convert
from diffusers_flax.data.images import decode_image, decode_mask

SEED = "AILab-CVC/SEED-Data-Edit"
FAST = ("a1557811266/Inter-Edit-Train", "OPPOer/X2Edit-Dataset")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(parquet_processing.__file__).parent)}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in SETS]
)
def test_a_known_set_is_read(tmp_path, capsys, name):
    pairs = make_set(name, tmp_path / "set")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "set").rglob("*")}
    out = tmp_path / "data"
    run(tmp_path / "set", out)
    rows = read_shards(out)
    assert pairs_of(rows) == pairs
    printed = capsys.readouterr().out
    assert f"set         {name}" in printed and "unreadable  0 of" in printed
    manifest = manifest_of(out)
    assert all(known.startswith(name) for known in manifest["sets"]) and not manifest["left_out"]
    for file in manifest["files"]:
        data = (out / file["file"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert sum(file["rows"] for file in manifest["files"]) == len(pairs)
    assert not (out / ".unfinished").exists()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "set").rglob("*")} == before
    check_columns(name, rows, printed)


def check_columns(name, rows, printed):
    """What a set has besides pairs."""
    if "Inter-Edit" in name:
        assert all((decode_mask(row["mask_image"]["bytes"])[:, :8] == 255).all() for row in rows)
        assert "mask_image" in printed
    if "X2Edit" in name or "ShareGPT" in name:
        references = [row["reference_image"] and grey_of(row["reference_image"]) for row in rows]
        assert references == ([None] * 4 + [200] * 4 if "X2Edit" in name else [None] * 7 + [7])
    if "NHR" in name:
        assert rows[3]["edit_prompt"] == ["do 3", "please do 3"]
    assert ("CC-BY-NC-ND-4.0 forbids commercial use and sharing" in printed) == ("pico" in name)
    assert ("CC-BY-NC-4.0 forbids commercial use\n" in printed) == ("SEED" in name)


def small_shards(monkeypatch):
    """Shards of a few pairs."""
    monkeypatch.setattr(writing, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(writing, "SHARD_BYTES", 400)


def many_pairs(folder, suffix):
    """Pairs in two archives in a random order, some of them twice."""
    rng = np.random.default_rng(0)
    images = {f"{n}{k}.png": encode(smooth(2 * n + (k == "b"))) for n in range(24) for k in "ab"}
    names = [str(x) for x in rng.permutation(list(images))]
    for number in range(2):
        members = [(name, images[name]) for name in names[number::2]]
        write_tar(folder / f"{number}{suffix}", members, "w:gz" if "gz" in suffix else "w")
    numbers = [*range(24), *rng.integers(0, 24, 12)]
    rows = [{"input": f"{n}a.png", "edited": f"{n}b.png", "edit": "x"} for n in numbers]
    write_lines(folder / "i.jsonl", rows)


KILLED = """
import os, signal, sys
from diffusers_flax.data import writing
from diffusers_flax.data.archives import convert
import parquet_processing
writing.ROW_GROUP_ROWS, writing.SHARD_BYTES = 2, 400
when, save, calls = int(sys.argv.pop(1)), convert.save, []
def killed(state, folder):
    save(state, folder)
    calls.append(folder)
    if len(calls) == when:
        os.kill(os.getpid(), signal.SIGKILL)
convert.save = killed
parquet_processing.main(sys.argv[1:])
"""


@pytest.mark.variants
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_killed_conversion_continues_after_the_last_shard(tmp_path, monkeypatch, suffix):
    """With the same rows, also with --drop and held-out pairs, and finished shards as they are."""
    folder, out = tmp_path / "set", tmp_path / "data"
    many_pairs(folder, suffix)
    small_shards(monkeypatch)
    drop = ["--drop", "duplicate", "near_duplicate"]
    run(folder, tmp_path / "whole", *drop, *flags_of(tmp_path / "whole-held", 3))
    drop += flags_of(tmp_path / "held", 3)
    flags = ["--pairs", folder, "--output_dir", out, "--preview", "", *drop]
    done = {}
    for when in (4, 3):
        command = [sys.executable, "-c", KILLED, str(when), *map(str, flags)]
        killed = subprocess.run(command, env=ENVIRONMENT, timeout=60, capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not list(out.glob("*.parquet"))
        files = manifest_of(out / ".unfinished")["files"]
        files = [out / ".unfinished" / file["file"] for file in files]
        now = {file.name: file.stat().st_mtime_ns for file in files}
        assert now.items() > done.items()
        done = now
    run(folder, out, *drop)
    assert {x.name: x.stat().st_mtime_ns for x in out.glob("*.parquet")}.items() >= done.items()
    assert read_shards(out) == read_shards(tmp_path / "whole") and len(read_shards(out)) == 21
    assert manifest_of(out)["left_out"] == manifest_of(tmp_path / "whole")["left_out"]
    held = [(tmp_path / x / "edits.jsonl").read_text() for x in ("held", "whole-held")]
    assert held[0] == held[1] and len(held[0]) > 300


def broken_set(folder):
    """Ten rows, of which five are pairs."""
    members = {f"{n}{kind}.png": plain(n) for n in range(10) for kind in "ab"}
    members["3b.png"] = plain(3)[:-30]
    members["4a.png"] = b"no image"
    del members["5b.png"], members["6a.png"], members["6b.png"]
    rows = [{"input": f"{n}a.png", "edited": f"{n}b.png", "edit": f"do {n}"} for n in range(10)]
    rows[7]["edit"] = " "
    write_lines(folder / "index.jsonl", rows)
    write_tar(folder / "images.tar", members)


def test_rows_that_cannot_be_used_are_named_and_counted(tmp_path, capsys, monkeypatch):
    small_shards(monkeypatch)
    broken_set(tmp_path / "set")
    error = refuse(tmp_path / "set", tmp_path / "data", capsys)
    assert "2 of 9 pairs cannot be used, more than --max_bad_fraction 0.1" in error
    error = refuse(tmp_path / "set", tmp_path / "data", capsys, "--max_bad_fraction", "0.25")
    assert "more than --max_bad_fraction 0.25; for example index.jsonl line 4: 3b.png: " in error
    run(tmp_path / "set", tmp_path / "data", "--max_bad_fraction", "0.5")  # goes on
    printed = capsys.readouterr().out
    assert list(pairs_of(read_shards(tmp_path / "data"))) == [f"do {n}" for n in (0, 1, 2, 8, 9)]
    for words in (
        "left out    2 pairs: damaged",
        "index.jsonl line 4: 3b.png: ",
        "index.jsonl line 5: 4a.png: no known image format",
        "index.jsonl line 6: 5b.png is in no archive or directory",
        "index.jsonl line 8: it has no instruction",
        "index.jsonl line 7: 6b.png is in no archive",
    ):
        assert words in printed, words
    assert num_left_out(tmp_path / "data") == {
        "a file is missing": 1, "damaged": 2, "no files here": 1, "no instruction": 1
    }  # fmt: skip


def test_workers_divide_the_archives(tmp_path, capsys):
    folder, seen = tmp_path / "set", {}
    for k in range(3):
        members = {f"{k}.input.png": plain(k), f"{k}.output.png": plain(9), f"{k}.txt": b"%d" % k}
        write_tar(folder / f"{k}.tar", members)
    for worker in range(2):
        out = tmp_path / f"data-{worker}"
        run(folder, out, "--worker", str(worker), "--num_workers", "2")
        pairs = pairs_of(read_shards(out))
        assert not seen.keys() & pairs.keys()
        seen |= pairs
    assert seen == {str(k): (k, 9) for k in range(3)}
    names = [{x.name for x in (tmp_path / f"data-{k}").glob("*.parquet")} for k in range(2)]
    assert not names[0] & names[1]  # the loader tells shards of processes apart by name and size
    # A worker with a part of the archives converts what it has.
    make_set(FAST[0], tmp_path / "inter")
    names = ("source_file", "target_file", "mask_file")
    row = {name: f"{name[:-5]}s/{name[:-5]}_0000001.png" for name in names}
    row |= {"source_archive": "source-00001-of-00002.tar", "instruction": "x"}
    row |= {"asset_archive": "asset-00001-of-00002.tar"}
    index = tmp_path / "inter" / "metadata" / "train-00001-of-00002.jsonl.gz"
    write_lines(index, [row] * 20)
    run(tmp_path / "inter", tmp_path / "own")
    assert len(read_shards(tmp_path / "own")) == 8
    assert "left out    20 pairs: no files here" in capsys.readouterr().out


def test_another_conversion_or_another_archive_is_not_continued(tmp_path, capsys, monkeypatch):
    make_set(FAST[0], tmp_path / "set")
    monkeypatch.setattr(convert, "remove", lambda path: 1 / 0)
    with pytest.raises(SystemExit):
        run(tmp_path / "set", tmp_path / "data")
    monkeypatch.undo()
    (tmp_path / "data" / "manifest.json").unlink()
    for shard in (tmp_path / "data").glob("*.parquet"):
        shard.rename(tmp_path / "data" / ".unfinished" / shard.name)
    error = refuse(tmp_path / "set", tmp_path / "data", capsys, "--max_pairs", "3")
    assert "is not empty (.unfinished)" in error
    (tmp_path / "set" / "more.txt").touch()
    assert "not empty" in refuse(tmp_path / "set", tmp_path / "data", capsys)
    (tmp_path / "set" / "more.txt").unlink()
    run(tmp_path / "set", tmp_path / "data")
    assert len(read_shards(tmp_path / "data")) == 8


def test_a_directory_that_has_files(tmp_path, capsys):
    """A finished conversion says so; only the program's own files are replaced."""
    make_set(FAST[0], tmp_path / "set")
    out = tmp_path / "data"
    run(tmp_path / "set", out, "--max_pairs", "3")
    assert list(pairs_of(read_shards(out))) == ["do 0", "do 1", "do 2"]
    run(tmp_path / "set", out, "--overwrite_output_dir")
    before = {x: x.stat().st_mtime_ns for x in out.iterdir()}
    run(tmp_path / "set", out)
    assert f"{out} is finished: 8 pairs (shards: 1" in capsys.readouterr().out
    refused = [(tmp_path / "set", ("--max_pairs", "3")), (out, ("--overwrite_output_dir",))]
    for source, args in refused:
        with pytest.raises(SystemExit):
            run(source, out, *args)
    assert {x: x.stat().st_mtime_ns for x in out.iterdir()} == before
    # The file of this name by script.py does not make downloaded shards the program's own.
    (out / "manifest.json").write_text('{"files": [{"file": "a.parquet", "url": "http://x"}]}')
    with pytest.raises(SystemExit):
        run(tmp_path / "set", out, "--overwrite_output_dir")
    assert {*out.iterdir()} == {*before}


def test_files_of_a_gzipped_archive_come_in_any_order(tmp_path):
    """All sources come first, then all results in another order, and another archive's."""
    folder, rng = tmp_path / "set", np.random.default_rng(0)
    orders = [rng.permutation(12) for _ in range(2)]
    first = [(f"{n}s.png", plain(n)) for n in orders[0]]
    write_tar(folder / "a.tar.gz", first + [(f"{n}t.png", plain(50 + n)) for n in range(6)], "w:gz")
    write_tar(folder / "b.tgz", [(f"{n}t.png", plain(50 + n)) for n in orders[1] if n > 5], "w:gz")
    rows = [{"input": f"{n}s.png", "edited": f"{n}t.png", "edit": str(n)} for n in range(12)]
    write_lines(folder / "index.jsonl", rows)
    run(folder / "index.jsonl", tmp_path / "data")
    pairs = pairs_of(read_shards(tmp_path / "data"))
    assert pairs == {str(n): (n, 50 + n) for n in range(12)}
    assert list(pairs) == [str(n) for n in [*range(6), *(n for n in orders[1] if n > 5)]]


def faulty_set(folder):
    """Pairs of one kind each; the first of two is kept."""
    one, two = smooth(1, 96, 96), smooth(2, 96, 96)
    framed = np.full((96, 96, 3), 255, np.uint8)
    framed[8:-8, 8:-8] = two[8:-8, 8:-8]
    a, b = encode(one), encode(two)
    near = encode(two, "JPEG", quality=92)
    members = {"a.png": a, "b.png": b, "framed.png": encode(framed), "near.jpg": near}
    members |= {
        "wide.png": encode(smooth(2, 64, 96)),
        "bad.png": a[:300],
        "c.png": encode(smooth(3)),
    }
    write_tar(folder / "x.tar", members)
    pairs = [("a", "b", "good"), ("a", "framed", "border"), ("a", "wide", "shape")]
    pairs += [("b", "b", "unchanged"), ("a", "b", "good"), ("a", "near", "good")]
    pairs += [("a", "bad", "unreadable"), ("c", "a", "good"), ("a", "b", "another instruction")]
    names = {name.partition(".")[0]: name for name in members}
    write_lines(
        folder / "i.jsonl",
        [{"input": names[x], "edited": names[y], "edit": text} for x, y, text in pairs],
    )


def texts_of(folder):
    return sorted(row["edit_prompt"] for row in read_shards(folder))


def test_pairs_with_faults_are_counted_and_left_out_if_asked(tmp_path, capsys):
    faulty_set(tmp_path / "set")
    report = tmp_path / "report.png"
    every = ("--max_bad_fraction", "1")
    run(tmp_path / "set", tmp_path / "all", "--report", str(report), *every)
    printed = capsys.readouterr().out
    assert (
        len(texts_of(tmp_path / "all")) == 8
    )  # without the damaged one, which nobody can train on
    for kind in ("shape", "border", "unchanged", "duplicate", "near_duplicate"):
        assert f" 1 {kind}: " in printed, printed
    assert "--drop shape border unchanged duplicate near_duplicate" in printed
    with Image.open(report) as image:
        assert image.width > 512
    names = ("border", "shape", "unchanged", "duplicate", "near_duplicate", "unreadable")
    run(tmp_path / "set", tmp_path / "none", "--drop", *names, *every)
    assert texts_of(tmp_path / "none") == ["another instruction", "good", "good"]
    run(tmp_path / "set", tmp_path / "some", "--drop", "border", "duplicate", *every)
    assert texts_of(tmp_path / "some") == sorted(
        ["good", "shape", "unchanged", "good", "good", "another instruction"]
    )
    left_out = manifest_of(tmp_path / "some")["left_out"]
    assert left_out["--drop border"] == {"count": 1, "examples": ["i.jsonl line 2"]}
    assert "left out    1 pairs: --drop duplicate" in capsys.readouterr().out
    run(tmp_path / "all", tmp_path / "again", "--drop", "near_duplicate")  # shards, too
    assert len(texts_of(tmp_path / "again")) == 7
    error = refuse(tmp_path / "set", tmp_path / "x", capsys, "--drop", "frame")
    assert "--drop" in error and "frame" in error


def held_out_pairs(folder):
    """{instruction: (original grey, edited grey)} of the list of held-out pairs."""
    edits = [json.loads(line) for line in (folder / "edits.jsonl").read_text().splitlines()]
    return {
        edit["edit"]: tuple(
            int(np.asarray(decode_image((folder / edit[key]).read_bytes()))[0, 0, 0])
            for key in ("input", "truth")
        )
        for edit in edits
    }


def flags_of(folder, number, *args):
    return ["--num_held_out", str(number), "--held_out_dir", str(folder), *args]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x == "AILab-CVC/SEED-Data-Edit" else pytest.mark.slow)
        for x in SETS
    ],
)
def test_held_out_pairs_are_whole_sequences(tmp_path, name):
    """Every pair is in one of both, turns stay together, and the choice is the seed's."""
    pairs = make_set(name, tmp_path / "set")
    turns = {text for text in pairs if text.split()[0] in ("turn", "first", "second", "third")}
    chosen = []
    for seed in range(4):
        out, folder = tmp_path / f"data-{seed}", tmp_path / f"held-{seed}"
        run(tmp_path / "set", out, *flags_of(folder, 3, "--seed", str(seed)))
        held, kept = held_out_pairs(folder), pairs_of(read_shards(out))
        assert held | kept == pairs and not held.keys() & kept.keys()
        assert not turns & held.keys() or turns <= held.keys()
        assert len(held) == 3 + (len(turns) - 1) * bool(turns & held.keys())
        chosen.append(frozenset(held))
    assert len(set(chosen)) > 1
    # Of shards, by the content of their images.
    run(tmp_path / "set", tmp_path / "all")
    run(tmp_path / "all", tmp_path / "part", *flags_of(tmp_path / "held", 3))
    held, kept = held_out_pairs(tmp_path / "held"), pairs_of(read_shards(tmp_path / "part"))
    assert held | kept == pairs
    assert not {greys[0] for greys in held.values()} & {greys[0] for greys in kept.values()}


def test_copies_of_a_held_out_image_are_not_trained_on(tmp_path, capsys):
    """WebDataset has the original once for each of its edits."""
    members = {}
    for n in range(12):
        members |= {f"{n}.input.png": plain(n // 3), f"{n}.output.png": plain(100 + n)}
        members[f"{n}.txt"] = f"do {n}".encode()
    write_tar(tmp_path / "set" / "x.tar", members)
    run(tmp_path / "set", tmp_path / "data", *flags_of(tmp_path / "held", 1))
    held, kept = held_out_pairs(tmp_path / "held"), pairs_of(read_shards(tmp_path / "data"))
    ((original, _),) = held.values()
    assert len(kept) == 9 and original not in {greys[0] for greys in kept.values()}
    assert "left out    2 pairs: its original image is held out" in capsys.readouterr().out


def test_lists_of_images_are_read_as_before(tmp_path, capsys):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.png").write_bytes(plain(1))
    write_lines(folder / "pairs.jsonl", [{"input": "a.png", "edited": "b.png", "edit": "x"}])
    write_tar(folder / "backup.tar", {"../x": b"x"})
    run(folder / "pairs.jsonl", tmp_path / "data")
    assert [x.name for x in (tmp_path / "data").iterdir()] == ["train-00000-of-00001.parquet"]
    error = refuse(folder / "pairs.jsonl", tmp_path / "x", capsys, "--worker=0", "--num_workers=2")
    assert "--worker goes with archives" in error


MISTAKES = {
    "zip": (lambda folder: (folder / "a.zip").touch(), [], "a.zip is not a .tar or .tar.gz"),
    "unknown keys": (
        lambda folder: write_lines(folder / "a.jsonl", [{"x": 1, "y": 2}]),
        [],
        "a.jsonl: no known keys of images and instruction (x, y)",
    ),
    "no samples": (
        lambda folder: write_tar(folder / "a.tar", {"1.jpg": plain(1), "1.txt": b"x"}),
        [],
        "has no pair that can be used; the first: a.tar 1 has jpg, txt",
    ),
    "held out": (
        lambda folder: write_tar(
            folder / "a.tar", {"1.input.png": plain(1), "1.output.png": plain(1), "1.txt": b"x"}
        ),
        ["--num_held_out", "1", "--held_out_dir", "held"],
        "--num_held_out 1 must be less than the 1 original images",
    ),
}


@pytest.mark.variants
@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(tmp_path, capsys, kind):
    make, args, words = MISTAKES[kind]
    (tmp_path / "set").mkdir()
    make(tmp_path / "set")
    assert words in refuse(tmp_path / "set", tmp_path / "data", capsys, *args)
