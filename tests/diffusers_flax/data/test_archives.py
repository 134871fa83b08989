"""parquet_processing.py --pairs with archives: every known set, resuming, hostile archives."""

import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from edit_sets import (
    SETS,
    grey_of,
    make_set,
    pairs_of,
    read_shards,
    refuse,
    run,
    split,
    write_lines,
    write_tar,
)
from known_sets import SCHEMAS, plain, write_known
from PIL import Image
from shards import encode, smooth
from trainer_runs import config_of, read_metrics, run_trainer

import evaluate_edits
import parquet_processing
from diffusers_flax.data.archives import convert, index, masks, reader, tar
from diffusers_flax.data.images import decode_mask
from diffusers_flax.data.pairs import IMAGE

FAST = ("a1557811266/Inter-Edit-Train", "OPPOer/X2Edit-Dataset")


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
    manifest = json.loads((out / "manifest.json").read_text())
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
    monkeypatch.setattr(convert, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(convert, "SHARD_BYTES", 400)


KILLED = """
import os, signal, sys
from diffusers_flax.data.archives import convert
import parquet_processing
convert.ROW_GROUP_ROWS, convert.SHARD_BYTES = 2, 400
close, reads = convert.Shards._close_shard, []
def killed(self, stop):
    close(self, stop)
    if self._number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert.Shards._close_shard = killed
parquet_processing.main(sys.argv[1:])
"""


@pytest.mark.variants
@pytest.mark.parametrize("name", ["a1557811266/Inter-Edit-Train", "AILab-CVC/SEED-Data-Edit"])
def test_a_killed_conversion_continues_with_the_same_shards(tmp_path, monkeypatch, capsys, name):
    make_set(name, tmp_path / "set", 9)
    small_shards(monkeypatch)
    run(tmp_path / "set", tmp_path / "whole")
    out = tmp_path / "data"
    flags = ["--pairs", tmp_path / "set", "--output_dir", out, "--preview", ""]
    environment = os.environ | {"PYTHONPATH": str(Path(parquet_processing.__file__).parent)}
    killed = subprocess.run([sys.executable, "-c", KILLED, *flags], env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert (out / ".unfinished").is_dir() and not list(out.glob("*.parquet"))
    done = {x.name for x in (out / ".unfinished").glob("*.parquet")}
    assert len(done) == 2
    read = []
    original = reader.Reader.read
    monkeypatch.setattr(
        reader.Reader, "read", lambda self, place: read.append(place[3]) or original(self, place)
    )
    run(tmp_path / "set", out)
    files = [
        {x.name: x.read_bytes() for x in y.glob("*.parquet")} for y in (tmp_path / "whole", out)
    ]
    assert files[0] == files[1] and len(files[0]) > 3
    rows = pq.read_table(out / sorted(done)[0]).to_pylist()
    written = {row["edited_image"]["path"] for row in rows}
    assert written and not written & {name.rpartition("/")[2] for name in read}
    manifests = [json.loads((y / "manifest.json").read_text()) for y in (tmp_path / "whole", out)]
    assert manifests[0] == manifests[1]


def member(name, size=3, **values):
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in values.items():
        setattr(info, key, value)
    return info


def tar_bytes(*infos, content=b"abc"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for info in infos:
            archive.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return file.getvalue()


def header(info, **options):
    """A header alone, which may promise any size."""
    return info.tobuf(**options)


SPARSE = bytearray(header(member("hole.png"), format=tarfile.GNU_FORMAT))
SPARSE[156:157], SPARSE[482:483] = b"S", b"\0"
SPARSE[386:410] = b"00000000000\0" * 2
SPARSE[483:495] = b"77777777777\0"
SPARSE[148:156] = b"        "
SPARSE[148:156] = b"%06o\0 " % sum(SPARSE)
GOOD = tar_bytes(member("a.input.png"))
NOISE = tar_bytes(member("x.png", 60_000), content=os.urandom(60_000))
DAMAGED = gzip.compress(NOISE)[:30_000] + b"x" + gzip.compress(NOISE, mtime=0)[30_001:]
HOSTILE = {
    "absolute": (tar_bytes(member("/etc/passwd")), "member /etc/passwd has a path outside"),
    "parent": (tar_bytes(member("a/../../x.png")), "member a/../../x.png has a path outside"),
    "long parent": (tar_bytes(member("a/" * 120 + "../x")), "has a path outside"),
    "symbolic link": (
        tar_bytes(member("x.png", 0, type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        "the member x.png is a link",
    ),
    "hard link": (
        tar_bytes(member("x.png", 0, type=tarfile.LNKTYPE, linkname="y")),
        "the member x.png is a link",
    ),
    "device": (
        tar_bytes(member("x.png", 0, type=tarfile.CHRTYPE)), "the member x.png is a device"
    ),
    "fifo": (tar_bytes(member("x.png", 0, type=tarfile.FIFOTYPE)), "x.png is a device"),
    "sparse": (bytes(SPARSE) + bytes(1024), "hole.png is a sparse file"),
    "huge": (header(member("x.png", 1 << 40)) + bytes(1024), "x.png has 1099511627776 bytes"),
    "huge name": (
        header(member("@LongLink", 1 << 33, type=b"L"), format=tarfile.GNU_FORMAT) + bytes(1024),
        "a header of",
    ),
    "truncated content": (GOOD[:514], "truncated: its member a.input.png ends at byte 515"),
    "truncated header": (GOOD[:1024] + GOOD[:100], "is truncated in a header"),
    "without an end": (GOOD[:1024], "has no end after its last member"),
    "preallocated": (GOOD[:1024] + bytes(2 << 20), "as an unfinished download has"),
    "no tar": (b"<html>not found</html>" * 99, "is not a tar archive at its start"),
    "garbage after": (GOOD[:1024] + b"x" * 1024, "is not a tar archive after 1 members"),
    "empty": (b"", "has no end"),
    "gzip truncated": (gzip.compress(GOOD, mtime=0)[:-20], "is truncated: its gzipped data end"),
    "gzip damaged": (DAMAGED, "is damaged"),
    "gzip of no tar": (gzip.compress(b"text" * 999), "is not a tar archive at its start"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_by_name(tmp_path, capsys, kind):
    data, words = HOSTILE[kind]
    folder = tmp_path / "set"
    write_tar(folder / "good.tar", {"0.input.png": plain(1), "0.output.png": plain(2)})
    name = "hostile.tar.gz" if "gzip" in kind else "hostile.tar"
    (folder / name).write_bytes(data)
    error = refuse(folder, tmp_path / "data", capsys)
    assert name in error and words in error
    written = [x.relative_to(tmp_path) for x in tmp_path.rglob("*") if "set" not in x.parts]
    assert {str(x) for x in written} <= {
        "data", "data/.unfinished", "data/.unfinished/plan.sqlite"
    }  # fmt: skip
    (folder / name).unlink()  # and the same command goes on without it
    write_tar(
        folder / "good.tar", {"0.input.png": plain(1), "0.output.png": plain(2), "0.txt": b"x"}
    )
    run(folder, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == {"x": (1, 2)}


def test_a_bomb_is_not_unpacked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tar, "FREE_BYTES", 1 << 16)
    folder = tmp_path / "set"
    folder.mkdir()
    inside = [(f"{n}.input.png", bytes(4 << 20)) for n in range(4)]
    write_tar(folder / "bomb.tar.gz", inside, "w:gz")
    error = refuse(folder, tmp_path / "data", capsys)
    assert "bomb.tar.gz unpacks to over 200 times its size" in error


@pytest.mark.parametrize(
    "suffixes, words",
    [
        ([".000", ".002"], "the part before x.tar.002 is missing"),
        ([".split.001", ".split.002"], None),
        ([".split.002", ".split.003"], "the parts before x.tar.split.002 are missing"),
        ([".part-ab", ".part-ac"], "the parts before x.tar.part-ab are missing"),
        (["", ".000"], "is there whole and in 1 parts"),
        ([f".part{n}" for n in range(12)], None),
        ([".aa", ".ab", ".ac"], None),
        ([f".{'abcdefghijklmnopqrstuvwxyz'[n // 26]}{chr(97 + n % 26)}" for n in range(30)], None),
    ],
)
def test_parts(tmp_path, capsys, suffixes, words):
    folder = tmp_path / "set"
    members = {"0.source.png": plain(1), "0.target.png": plain(2), "0.txt": b"make it 2"}
    file = write_tar(folder / "x.tar", members)
    if "" in suffixes:
        (folder / "x.tar.000").write_bytes(b"")
    else:
        split(file, suffixes)
    (folder / "x.tar.asc").write_bytes(b"a signature")
    (folder / "x.tar.md").write_bytes(b"a description")
    if words:
        assert words in refuse(folder, tmp_path / "data", capsys)
    else:
        run(folder, tmp_path / "data")
        assert pairs_of(read_shards(tmp_path / "data")) == {"make it 2": (1, 2)}


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


def test_rows_that_cannot_be_used_are_named_and_counted(tmp_path, capsys):
    broken_set(tmp_path / "set")
    run(tmp_path / "set", tmp_path / "data", "--max_bad_fraction", "0.5")
    printed = capsys.readouterr().out
    assert list(pairs_of(read_shards(tmp_path / "data"))) == [f"do {n}" for n in (0, 1, 2, 8, 9)]
    for words in (
        "left out    2 pairs: damaged",
        "index.jsonl line 4: 3b.png: ",
        "index.jsonl line 5: 4a.png: no known image format",
        "left out    1 pairs: a file is missing",
        "index.jsonl line 6: 5b.png is in no archive or directory",
        "left out    1 pairs: no instruction",
        "index.jsonl line 8: it has no instruction",
        "left out    1 pairs: no files here",
        "index.jsonl line 7: 6b.png is in no archive",
    ):
        assert words in printed, words
    left_out = json.loads((tmp_path / "data" / "manifest.json").read_text())["left_out"]
    assert {kind: found["count"] for kind, found in left_out.items()} == {
        "a file is missing": 1, "damaged": 2, "no files here": 1, "no instruction": 1
    }  # fmt: skip


def test_too_many_bad_rows_stop_the_conversion(tmp_path, capsys):
    broken_set(tmp_path / "set")
    error = refuse(tmp_path / "set", tmp_path / "data", capsys)
    assert "2 of 9 rows cannot be used, more than --max_bad_fraction 0.1" in error
    error = refuse(tmp_path / "set", tmp_path / "data", capsys, "--max_bad_fraction", "0.25")
    assert "over 1 of 7 pairs are damaged, more than --max_bad_fraction 0.25" in error


def test_sources_by_url_name_the_step_that_comes_first(tmp_path, capsys):
    make_set("apple/pico-banana-400k", tmp_path / "set")
    (tmp_path / "set" / "train_0.tar.gz").unlink()
    error = refuse(tmp_path / "set", tmp_path / "data", capsys)
    assert "URL only" in error and "map_openimage_url_to_local.py" in error


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
    error = refuse(folder, tmp_path / "none", capsys, "--worker", "3", "--num_workers", "4")
    assert "only 3 archives have pairs, so --worker 3 has none" in error
    names = [{x.name for x in (tmp_path / f"data-{k}").glob("*.parquet")} for k in range(2)]
    assert not names[0] & names[1]  # the loader tells shards of processes apart by name and size
    # A worker with a part of the archives converts what it has.
    make_set(FAST[0], tmp_path / "inter")
    write_lines(
        tmp_path / "inter" / "metadata" / "train-00001-of-00002.jsonl.gz",
        [
            {
                "instruction": "x",
                "source_archive": "source-00001-of-00002.tar",
                "source_file": "sources/source_0000001.png",
                "asset_archive": "asset-00001-of-00002.tar",
                "target_file": "targets/target_0000001.png",
                "mask_file": "masks/mask_0000001.png",
            }
        ]
        * 20,
    )
    run(tmp_path / "inter", tmp_path / "own")
    assert len(read_shards(tmp_path / "own")) == 8
    assert "left out    20 pairs: no files here" in capsys.readouterr().out


def test_another_conversion_or_another_archive_is_not_continued(tmp_path, capsys, monkeypatch):
    make_set(FAST[0], tmp_path / "set")
    monkeypatch.setattr(convert, "finish", lambda *args: 1 / 0)
    with pytest.raises(SystemExit):
        run(tmp_path / "set", tmp_path / "data")
    monkeypatch.undo()
    error = refuse(tmp_path / "set", tmp_path / "data", capsys, "--max_pairs", "3")
    assert "another conversion that is not complete: max_pairs was None and is 3" in error
    archive = next((tmp_path / "set" / "asset_shards").iterdir())
    os.utime(archive, (1, 1))
    error = refuse(tmp_path / "set", tmp_path / "data", capsys)
    assert f"{archive.name} has changed" in error


def test_the_first_pairs(tmp_path):
    make_set(FAST[0], tmp_path / "set")
    run(tmp_path / "set", tmp_path / "data", "--max_pairs", "3")
    assert list(pairs_of(read_shards(tmp_path / "data"))) == ["do 0", "do 1", "do 2"]
    with pytest.raises(SystemExit):  # complete shards are not replaced
        run(tmp_path / "set", tmp_path / "data")
    run(tmp_path / "set", tmp_path / "data", "--overwrite_output_dir")
    assert len(read_shards(tmp_path / "data")) == 8


def test_files_of_a_gzipped_archive_wait_on_disk(tmp_path, monkeypatch):
    """All sources come first, then all results in another order, and another archive's."""
    monkeypatch.setattr(reader, "WINDOW_BYTES", 100)
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


def test_a_finished_gzipped_archive_is_not_read_again(tmp_path, monkeypatch):
    folder, read = tmp_path / "set", []
    for k, name in enumerate("ab"):
        files = {"input.png": plain(k), "output.png": plain(9), "txt": b"x"}
        members = {f"{n}.{kind}": data for n in range(3) for kind, data in files.items()}
        write_tar(folder / f"{name}.tgz", members, "w:gz")
    finish, at = convert.Shards.finish, tar.Stream.at

    def interrupted(self, stop):
        finish(self, stop)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert.Shards, "finish", interrupted)
        with pytest.raises(SystemExit):
            run(folder, tmp_path / "data")
    monkeypatch.setattr(
        tar.Stream, "at", lambda self, *place: read.append(self.archive.name) or at(self, *place)
    )
    run(folder, tmp_path / "data")
    assert set(read) == {"b.tgz"}
    assert len(read_shards(tmp_path / "data")) == 6


def test_columns_hashes_and_sums_are_those_of_plain_python(tmp_path, monkeypatch):
    cells = [{"bytes": os.urandom(n), "path": f"{n}ü.png"} for n in range(5)]
    for some in (cells, [*cells, None], [{"bytes": b"", "path": None}]):
        assert convert.image_array(some).equals(pa.array(some, IMAGE))
    for block in (bytes(512), b"\xff" * 512, os.urandom(512)):
        assert tar.sum_of(block) == sum(block)
    monkeypatch.setattr(convert, "HASH_BLOCK", 1000)
    data = os.urandom(5300)
    with open(tmp_path / "x", "wb", buffering=0) as file:
        digest = convert.Hash(tmp_path / "x")
        for first in range(0, len(data), 700):
            file.write(data[first : first + 700])
            digest.follow(file.tell())
        assert digest.finish(len(data)) == hashlib.sha256(data).hexdigest()


def test_a_name_with_half_a_letter_leaves_the_other_rows(tmp_path):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {f"{k}.png": plain(k) for k in range(4)})
    names = [("0.png", "1.png"), ("\ud800.png", "1.png"), ("2.png", "3.png")]
    rows = [{"input": x, "edited": y, "edit": x[0]} for x, y in names]
    write_lines(folder / "i.jsonl", [*rows[:1], rows[1] | {"edit": "x"}, rows[2]])
    run(folder, tmp_path / "data", "--max_bad_fraction", "0.5")
    assert pairs_of(read_shards(tmp_path / "data")) == {"0": (0, 1), "2": (2, 3)}
    left_out = json.loads((tmp_path / "data" / "manifest.json").read_text())["left_out"]
    assert sum(found["count"] for found in left_out.values()) == 1


def test_a_json_array_is_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "CHUNK", 7)
    rows = [{"a": "x" * n, "b": [{"c": ']}\\"'}, n]} for n in range(30)]
    for file, data in (
        ("a.json", json.dumps(rows, indent=1).encode()),
        ("a.json.gz", gzip.compress(json.dumps(rows).encode())),
    ):
        (tmp_path / file).write_bytes(data)
        assert [row for _, row in index.read_rows(tmp_path / file)] == rows
    (tmp_path / "b.json").write_text(json.dumps(rows)[:-20])
    with pytest.raises(ValueError, match=r"is not a complete JSON array: object 30 "):
        list(index.read_rows(tmp_path / "b.json"))
    two = json.dumps(rows[:2]) + "\n \n" + json.dumps(rows[2:])
    (tmp_path / "two.json").write_text(two)  # one array after the other
    assert [row for _, row in index.read_rows(tmp_path / "two.json")] == rows
    (tmp_path / "more.json").write_text(json.dumps(rows) + " and more")
    with pytest.raises(ValueError, match="has more after its JSON array: and mor"):
        list(index.read_rows(tmp_path / "more.json"))


def test_columns_of_lists_are_as_many_pairs(tmp_path):
    names = [("a.png", "b.png"), ("b.png", "c.png"), ("c.png", "a.png")]
    members = {name: plain(n) for n, name in enumerate(("a.png", "b.png", "c.png"))}
    write_tar(tmp_path / "set" / "x.tar", members)
    inputs, edited = zip(*names)
    columns = {"input": inputs, "edited": edited, "instruction": ["one", "two", " "]}
    (tmp_path / "set" / "i.json").write_text(json.dumps(columns))
    (tmp_path / "set" / "y.tar.xz").write_bytes(b"another archive, which no pair needs")
    run(tmp_path / "set", tmp_path / "data", "--max_bad_fraction", "0.5")
    rows = read_shards(tmp_path / "data")
    assert pairs_of(rows) == {"one": (0, 1), "two": (1, 2)}
    table = pa.Table.from_pylist(
        [row | {"edit_prompt": text} for row, text in zip(rows, ("one", " "))]
    )
    (tmp_path / "shards").mkdir()
    pq.write_table(table, tmp_path / "shards" / "train-00000-of-00001.parquet")
    run(tmp_path / "shards", tmp_path / "again", "--max_bad_fraction", "0.5")
    assert [row["edit_prompt"] for row in read_shards(tmp_path / "again")] == ["one"]


def test_masks_of_run_lengths(tmp_path):
    """[height, width], columns first; the text has 5 bits of a number in a character."""
    grid = np.zeros((5, 7), bool)
    grid[1:4, 2:6] = True
    flat = grid.T.ravel()
    starts = np.flatnonzero(np.diff(flat.astype(int), prepend=0, append=0))
    counts = np.diff(np.concatenate([[0], starts, [35]])).tolist()
    assert masks.decode_counts("02203") == [0, 2, 2, 2, 5]  # 0 and 3 more than two before
    for given in (counts, "".join(map(encode_number, differences_of(counts)))):
        mask = {"size": [5, 7], "counts": given}
        assert (
            np.asarray(Image.open(io.BytesIO(masks.run_lengths_to_png(mask)))) == grid * 255
        ).all()
    with pytest.raises(ValueError, match="do not fill 7x5"):
        masks.run_lengths_to_png({"size": [5, 7], "counts": counts[:-1]})
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"a.png": plain(1, (5, 7)), "b.png": plain(2, (5, 7))})
    row = {"input_images": ["a.png"], "output_images": ["b.png"], "prompt": "x"}
    write_lines(folder / "i.jsonl", [row | {"mask": {"size": [5, 7], "counts": counts}}])
    run(folder, tmp_path / "data")
    (row,) = read_shards(tmp_path / "data")
    assert (decode_mask(row["mask_image"]["bytes"]) == grid * 255).all()


def differences_of(counts):
    return [n - (counts[i - 2] if i > 2 else 0) for i, n in enumerate(counts)]


def encode_number(number):
    """A signed number in 5 bits a character from the lowest, 32 if more follow, plus 48."""
    text = ""
    while True:
        bits, number = number & 31, number >> 5
        more = number != (-1 if bits & 16 else 0)
        text += chr(48 + bits + 32 * more)
        if not more:
            return text


def test_ambiguous_names(tmp_path, capsys):
    """Equal names in two archives: the one with the edited image's archive, or none."""
    folder = tmp_path / "set"
    write_tar(folder / "a.tar", {"in.png": plain(1), "out_a.png": plain(2)})
    write_tar(folder / "b.tar", {"in.png": plain(3, (9, 9)), "out_b.png": plain(4)})
    write_tar(folder / "c.tar", {"out_c.png": plain(5)})
    rows = [{"input": "in.png", "edited": f"out_{k}.png", "edit": k} for k in "abc"]
    write_lines(folder / "i.jsonl", rows)
    run(folder, tmp_path / "data", "--max_bad_fraction", "0.5")
    assert pairs_of(read_shards(tmp_path / "data")) == {"a": (1, 2), "b": (3, 4)}
    assert (
        "in.png is in a.tar (in.png) and b.tar (in.png), with different content"
        in capsys.readouterr().out
    )


def test_the_same_names_and_texts_as_tarfile(tmp_path):
    """Long names, PAX times and directories, read by ours and by tarfile."""
    for number, form in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        file = tmp_path / f"{number}.tar"
        names = ["./a/b.png", "x" * 90, *["d/" * 60 + f"{n}.png" for n in range(3)], "ü.png"]
        with tarfile.open(file, "w", format=form) as archive:
            archive.addfile(member("a", 0, type=tarfile.DIRTYPE))
            for name in names:
                archive.addfile(member(name, 700, mtime=1.5), io.BytesIO(name.encode() * 700))
        (found,) = [x for x in tar.find_archives(tmp_path, [file])]
        with tar.Stream(found) as stream, tarfile.open(file) as archive:
            ours = {n: stream.at(at, size) for n, at, size in tar.list_members(found, stream)}
            theirs = {x.name: archive.extractfile(x).read() for x in archive if x.isreg()}
        assert ours == {name.removeprefix("./"): data for name, data in theirs.items()}


@pytest.mark.parametrize("name", ["Bin1117/AnyEdit", "BryanW/HumanEdit", "TIGER-Lab/OmniEdit"])
def test_shards_are_converted_too(tmp_path, capsys, name, monkeypatch):
    """So that pairs with faults can be left out; a second image and masks stay."""
    (known,) = [x for x in SCHEMAS if x.startswith(name)]
    folder = write_known(tmp_path / "set", known, 9, row_group_size=4)
    small_shards(monkeypatch)
    run(folder, tmp_path / "data", "--drop", "duplicate")
    rows = read_shards(tmp_path / "data")
    text = "{}.0" if "Omni" in name else "{}"
    assert pairs_of(rows) == {text.format(n): (n, 255 - n) for n in range(9)}
    assert ("reference_image" in rows[0]) == ("AnyEdit" in name)
    assert ("mask_image" in rows[0]) == ("HumanEdit" in name)
    assert ("Omni" not in name) or rows[2]["edit_prompt"] == ["2.0", "2.1", "2.2"]
    assert f"set         {known} by its columns, " in capsys.readouterr().out
    # From the middle of a row group on, nothing before it is read.
    (shard,) = folder.glob("*.parquet")
    rows = reader.rows_from(shard, 6)
    assert [grey_of(x.column(names.original)[n].as_py()) for names, x, n in rows] == [6, 7, 8]


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
    left_out = json.loads((tmp_path / "some" / "manifest.json").read_text())["left_out"]
    assert left_out["--drop border"] == {"count": 1, "examples": ["i.jsonl line 2"]}
    assert "left out    1 pairs: --drop duplicate" in capsys.readouterr().out
    run(tmp_path / "all", tmp_path / "again", "--drop", "near_duplicate")  # shards, too
    assert len(texts_of(tmp_path / "again")) == 7
    error = refuse(tmp_path / "set", tmp_path / "x", capsys, "--drop", "frame")
    assert "--drop frame is unknown; choose from unreadable, shape" in error


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETS, "Bin1117/AnyEdit", "BryanW/HumanEdit"])
def test_a_known_set_trains(model, lenient_optimizer, tmp_path, monkeypatch, name):
    """20 steps and an evaluation by the command lines that a user types."""
    data = tmp_path / "data"
    if name in SETS:
        greys = [*make_set(name, tmp_path / "set").values()]
        run(tmp_path / "set", data)
    else:
        greys = [(n, 255 - n) for n in range(8)]
        write_known(data, name)
    has_masks = name in ("a1557811266/Inter-Edit-Train", "BryanW/HumanEdit")
    options = {"max_train_steps": 20, "mask_loss_weight": 3.0 if has_masks else 1.0}
    run_trainer(config_of(model, data, tmp_path / "out", **options), monkeypatch)
    rows = read_metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(np.isfinite(row["loss"]) for row in rows)
    flags = {"model": tmp_path / "out", "data_dir": data, "output_dir": tmp_path / "scores"}
    flags |= {"clip_model": "", "num_inference_steps": 1, "resolution": 16}
    evaluate_edits.main([f"--{flag}={value}" for flag, value in flags.items()])
    scores = json.loads((tmp_path / "scores" / "results.json").read_text())
    copied = np.abs(np.subtract(*np.transpose(greys))).mean() / 255
    assert scores["baselines"][0]["l1"] == pytest.approx(copied, abs=1e-4)
    assert np.isfinite(scores["rows"][0]["l1"])


def test_lists_of_images_are_read_as_before(tmp_path, capsys):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.png").write_bytes(plain(1))
    write_lines(folder / "pairs.jsonl", [{"input": "a.png", "edited": "b.png", "edit": "x"}])
    (folder / "other.zip").touch()
    run(folder / "pairs.jsonl", tmp_path / "data")
    assert [x.name for x in (tmp_path / "data").iterdir()] == ["train-00000-of-00001.parquet"]
    error = refuse(folder / "pairs.jsonl", tmp_path / "x", capsys, "--worker=0", "--num_workers=2")
    assert "--worker goes with archives" in error


MISTAKES = {
    "nothing": (lambda folder: None, [], "must be a .jsonl or .csv list, an index"),
    "zip": (lambda folder: (folder / "a.zip").touch(), [], "a.zip is not a .tar or .tar.gz"),
    "unknown keys": (
        lambda folder: write_lines(folder / "a.jsonl", [{"x": 1, "y": 2}]),
        [],
        "a.jsonl: no known keys of images and instruction (x, y)",
    ),
    "no samples": (
        lambda folder: write_tar(folder / "a.tar", {"1.jpg": plain(1), "1.txt": b"x"}),
        [],
        "has no pair that can be used (1 rows); the first: a.tar 1 has jpg, text",
    ),
    "worker": (
        lambda folder: None,
        ["--worker", "1"],
        "--worker K and --num_workers N go together",
    ),
    "fraction": (lambda folder: None, ["--max_bad_fraction", "2"], "must be from 0 to 1"),
}


@pytest.mark.variants
@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(tmp_path, capsys, kind):
    make, args, words = MISTAKES[kind]
    (tmp_path / "set").mkdir()
    make(tmp_path / "set")
    assert words in refuse(tmp_path / "set", tmp_path / "data", capsys, *args)
