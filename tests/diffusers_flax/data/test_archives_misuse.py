"""parquet_processing.py --pairs: partial downloads, odd rows, kills at any place, two processes."""

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from edit_sets import make_set, pairs_of, read_shards, refuse, run, write_lines, write_tar
from known_sets import plain, write_known
from shards import encode, smooth

import parquet_processing
from diffusers_flax.data.archives import convert, plan

KEPT = ("--max_bad_fraction", "1")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(parquet_processing.__file__).parent)}


def rows_of(*names):
    """Rows of an index: the pair of each directory."""
    return [{"input": f"{x}a.png", "edited": f"{x}b.png", "edit": f"of {x}".strip()} for x in names]


def left_out(folder):
    content = json.loads((folder / "manifest.json").read_text())["left_out"]
    return {kind: found["count"] for kind, found in content.items()}


@pytest.mark.parametrize(
    "paths, members, wanted",
    {
        "an archive that is not here": (
            ["part0/0/", "part1/0/", "part2/0/"],
            {"part1.tar": "part1/0/"},
            {"of part1/0/": 0},
        ),
        "other directories": (["cats/", "dogs/"], {"x.tar": "dogs/"}, {"of dogs/": 0}),
        "an archive with another number": (["p0/", "p1/"], {"p1.tar": ""}, {"of p1/": 0}),
        "more in the archive": (["0/", "1/"], {"x.tar": "data/1/"}, {"of 1/": 0}),
        "more in the index": (["home/set/1/"], {"x.tar": "1/"}, {"of home/set/1/": 0}),
        "up and down": (["../set/1/"], {"x.tar": "1/"}, {"of ../set/1/": 0}),
        "by the names of archives": (
            ["one/", "two/"],
            {"one.tar": "one/", "two.tar": "two/"},
            {"of one/": 0, "of two/": 1},
        ),
    }.values(),
)  # fmt: skip
def test_paths_never_take_the_images_of_another_directory(tmp_path, paths, members, wanted):
    folder = tmp_path / "set"
    for number, (name, prefix) in enumerate(members.items()):
        images = {f"{prefix}a.png": plain(number), f"{prefix}b.png": plain(100 + number)}
        write_tar(folder / name, images)
    write_lines(folder / "i.jsonl", rows_of(*paths))
    run(folder, tmp_path / "data", *KEPT)
    found = pairs_of(read_shards(tmp_path / "data"))
    assert found == {text: (n, 100 + n) for text, n in wanted.items()}


def test_two_paths_are_never_one_file(tmp_path, capsys):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"a.png": plain(1), "b.png": plain(2)})
    write_lines(folder / "i.jsonl", rows_of("cats/", "dogs/"))
    error = refuse(folder, tmp_path / "data", capsys)
    assert "has no pair that can be used (2 rows)" in error
    # The name of the archive decides, whichever comes first.
    (folder / "x.tar").rename(folder / "dogs.tar")
    run(folder, tmp_path / "named")
    assert pairs_of(read_shards(tmp_path / "named")) == {"of dogs/": (1, 2)}
    assert left_out(tmp_path / "named") == {"no files here": 1}


def test_many_rows_without_files_do_not_hide_a_directory(tmp_path):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"data/z/a.png": plain(1), "data/z/b.png": plain(2)})
    write_lines(folder / "i.jsonl", rows_of(*[f"{n}/" for n in range(200)], "z/"))
    run(folder, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == {"of z/": (1, 2)}
    assert left_out(tmp_path / "data") == {"no files here": 200}


def test_equal_names_are_compared_by_content(tmp_path, capsys):
    folder = tmp_path / "set"
    one, other = plain(1), plain(3)
    assert len(one) == len(other)
    write_tar(folder / "x.tar", [("a.png", other), ("a.png", one), ("b.png", plain(2))])
    write_lines(folder / "i.jsonl", rows_of(""))
    run(folder, tmp_path / "last")  # in one archive, as tar unpacks it
    assert pairs_of(read_shards(tmp_path / "last")) == {"of": (1, 2)}
    write_tar(folder / "y.tar", {"b.png": plain(2)})
    run(folder, tmp_path / "same")
    write_tar(folder / "y.tar", {"b.png": plain(5)})
    error = refuse(folder, tmp_path / "other", capsys)
    assert "b.png is in x.tar (b.png) and y.tar (b.png), with different content" in error
    names = {f"{n}.tar": {"s.png": plain(n), f"{n}.png": plain(100 + n)} for n in (1, 11)}
    for name, members in names.items():
        write_tar(tmp_path / "hints" / name, members)
    rows = [
        {"source_archive": f"{n}.tar", "source_file": "s.png", "asset_archive": f"{n}.tar"}
        | {"target_file": f"{n}.png", "mask_file": None, "instruction": f"{n}"}
        for n in (1, 11)
    ]
    write_lines(tmp_path / "hints" / "i.jsonl", rows)
    run(tmp_path / "hints", tmp_path / "hinted")
    assert pairs_of(read_shards(tmp_path / "hinted")) == {"1": (1, 101), "11": (11, 111)}


ODD = [
    {"input": {"path": "a.png"}, "edited": {"bytes": None}, "edit": "x"},
    {"input": "/", "edited": ".", "edit": "x"},
    {"input": "https://host/", "edited": "b.png", "edit": "x"},
    {"input": 3, "edited": ["b.png"], "edit": "x"},
    {"input": "a.png", "edited": "b.png", "edit": {"a": 1}},
    {"input": "a.png", "edited": "b.png", "edit": "half a \ud83d letter"},
    {"input": "\ud83d.png", "edited": "b.png", "edit": "x"},
    {"input": "a.png", "edited": "b.png", "edit": "x", "mask": {"counts": "~" * 99_999}},
    {"input": "a.png", "edited": "b.png", "edit": "x", "mask": {"size": [0, 0], "counts": []}},
    {"input": "a.png", "edited": "b.png", "edit": "x", "mask": {"size": [-1, -1], "counts": [1]}},
    {"input": "a.png", "edited": "b.png", "edit": "x", "mask": [1, 2, 3, 4]},
    {"input": "a\0.png", "edited": "b\n.png", "edit": "x"},
    {"input": ["a.png"] * 100_000, "edited": "c.png", "edit": "x"},
    {"edited": "b.png", "edit": "x"},
    {"data": "turns"},
    {"data": [{"input_images": 1}, "x"]},
    {},
    [],
    "text",
    None,
]


def test_odd_rows_are_counted_and_the_good_one_stays(tmp_path, capsys):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"a.png": plain(1), "b.png": plain(2)})
    write_lines(folder / "i.jsonl", [*rows_of(""), *ODD])
    run(folder, tmp_path / "data", *KEPT)
    assert pairs_of(read_shards(tmp_path / "data")) == {"of": (1, 2)}
    assert sum(left_out(tmp_path / "data").values()) == len(ODD)
    printed = capsys.readouterr().out
    assert "line 13: b .png is in no" in printed
    assert "line 7: a text has no letter at 7" in printed
    turns = [{"input_images": ["a.png"], "output_images": ["b.png"], "prompt": "good"}]
    odd = ["x", [3], [{"input_images": ["a.png"]}, "x"], None, {"a": 1}]
    write_lines(folder / "i.jsonl", [{"data": x} for x in (turns, *odd)])
    run(folder, tmp_path / "turns", *KEPT)
    assert pairs_of(read_shards(tmp_path / "turns")) == {"good": (1, 2)}


def test_keys_that_nearly_match_a_set(tmp_path, capsys):
    """Masks and second images stay; keys such as data or conversations are no set by themselves."""
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {f"{x}.png": plain(n) for n, x in enumerate("abcd")})
    row = {"source_image": "a.png", "target_image": "b.png", "instruction": "x"}
    more = {"mask_image": "c.png", "reference_image": "d.png", "data": [1], "conversations": []}
    write_lines(folder / "i.jsonl", [row | more])
    write_lines(folder / "other.jsonl", [{"data": [1, 2]}, {"data": {}}])
    run(folder, tmp_path / "data")
    (row,) = read_shards(tmp_path / "data")
    assert row["mask_image"]["path"] == "c.png" and row["reference_image"]["path"] == "d.png"
    assert "other.jsonl: no known keys of images and instruction (data)" in capsys.readouterr().out
    rows = [{"image": "abc.png", "conversations": [{"from": "human", "value": "what is it"}]}]
    write_lines(folder / "i.jsonl", rows)
    error = refuse(folder, tmp_path / "no", capsys)
    assert "image is not a list of an input and a result" in error


def test_indexes_that_are_damaged_are_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"a.png": plain(1), "b.png": plain(2)})
    table = pa.Table.from_pylist(rows_of("") * 999)
    pq.write_table(table, folder / "i.parquet")
    whole = (folder / "i.parquet").read_bytes()
    lines = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows_of("") * 999))
    for name, data in (
        ("i.parquet", whole[:-9]),
        ("i.parquet", b""),
        ("i.parquet", whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :]),
        ("i.jsonl.gz", lines[:-9]),
        ("i.jsonl.gz", b"no gzip"),
        ("i.json", b'[{"input": "a.png", '),
    ):
        (folder / "i.parquet").unlink(missing_ok=True)
        (folder / name).write_bytes(data)
        assert f"{name} " in refuse(folder, tmp_path / f"data-{name}", capsys), name
        (folder / name).unlink()


def header(kind, size, name=b"x"):
    """A tar header with a size in base 256, which may be negative."""
    info = tarfile.TarInfo(name.decode())
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (size % (1 << 96)).to_bytes(12, "big")
    block[124] |= 0x80
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


LONG = header(b"L", 4) + b"abc\0" + bytes(508)
HOSTILE = {
    "many long names": LONG * 5000,
    "negative long name": header(b"L", -1024) + bytes(2048),
    "negative extension": header(b"x", -1) + bytes(2048),
    "negative file": header(b"0", -512) + bytes(2048),
    "negative unknown": header(b"Z", -(1 << 40)) + bytes(2048),
    "huge extension": header(b"x", 1 << 50) + bytes(2048),
}


@pytest.mark.parametrize("opener", [bytes, gzip.compress])
@pytest.mark.parametrize("kind", HOSTILE)
def test_headers_with_odd_sizes(tmp_path, capsys, kind, opener):
    folder = tmp_path / "set"
    folder.mkdir()
    name = "x.tar" if opener is bytes else "x.tar.gz"
    (folder / name).write_bytes(opener(HOSTILE[kind] + bytes(1024)))
    assert name in refuse(folder, tmp_path / "data", capsys)


def test_names_with_line_ends_and_bytes_that_are_no_text(tmp_path, capsys):
    folder, file = tmp_path / "set", io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", encoding="latin-1", format=tarfile.GNU_FORMAT) as x:
        for name, grey in (("é\n.input.png", 1), ("é\n.output.png", 2)):
            info = tarfile.TarInfo(name)
            info.size = len(plain(grey))
            x.addfile(info, io.BytesIO(plain(grey)))
        info = tarfile.TarInfo("é\n.txt")
        info.size = 1
        x.addfile(info, io.BytesIO(b"x"))
    folder.mkdir()
    (folder / "x.tar").write_bytes(file.getvalue())
    run(folder, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == {"x": (1, 2)}
    data = file.getvalue().replace(b".input", b".other")
    checksum = sum(data[:148]) + 256 + sum(data[156:512])
    (folder / "x.tar").write_bytes(data[:148] + b"%06o\0 " % checksum + data[156:])
    error = refuse(folder, tmp_path / "no", capsys)
    assert "has no pair that can be used" in error


def test_the_same_command_after_downloading_what_was_missing(tmp_path, capsys):
    """The plan is made again, also for a changed index, as long as no shard is written."""
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"b.png": plain(2)})
    write_lines(folder / "i.jsonl", rows_of(""))
    assert "a.png is in no archive" in refuse(folder, tmp_path / "data", capsys)
    write_lines(folder / "i.jsonl", [{"input": "a.png", "edited": "b.png", "edit": "new"}])
    assert "a.png is in no archive" in refuse(folder, tmp_path / "data", capsys)
    (folder / "a.png").write_bytes(plain(1))
    run(folder, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == {"new": (1, 2)}


def test_a_changed_index_or_a_shard_that_is_gone_is_not_continued(tmp_path, capsys, monkeypatch):
    make_set("sysuyy/ImgEdit", tmp_path / "set")
    out = tmp_path / "data"
    monkeypatch.setattr(convert, "finish", lambda *args: 1 / 0)
    with pytest.raises(SystemExit):
        run(tmp_path / "set", out)
    monkeypatch.undo()
    lost = next((out / ".unfinished").glob("*.parquet"))
    content = lost.read_bytes()
    lost.unlink()
    assert f"{lost.name} has changed or gone" in refuse(tmp_path / "set", out, capsys)
    lost.write_bytes(content)
    os.utime(next((tmp_path / "set" / "Parquet").iterdir()), (1, 1))
    assert "an index or a file beside the archives has changed" in refuse(
        tmp_path / "set", out, capsys
    )


def test_two_conversions_do_not_share_a_directory(tmp_path, capsys):
    make_set("sysuyy/ImgEdit", tmp_path / "set")
    database = tmp_path / "data" / ".unfinished" / "plan.sqlite"
    database.parent.mkdir(parents=True)
    with plan.Plan(database):
        error = refuse(tmp_path / "set", tmp_path / "data", capsys)
        assert "another conversion has the same --output_dir" in error
    run(tmp_path / "set", tmp_path / "data")
    (tmp_path / "bad" / ".unfinished").mkdir(parents=True)
    (tmp_path / "bad" / ".unfinished" / "plan.sqlite").write_bytes(b"no database" * 99)
    assert "file is not a database" in refuse(tmp_path / "set", tmp_path / "bad", capsys)


def test_a_list_beside_an_unrelated_archive_is_still_a_list(tmp_path):
    folder = tmp_path / "set"
    write_tar(folder / "backup.tar", {"../x": b"x"})
    for name in "ab":
        (folder / f"{name}.png").write_bytes(plain(1))
    write_lines(folder / "pairs.jsonl", rows_of(""))
    run(folder / "pairs.jsonl", tmp_path / "data")
    assert [x.name for x in (tmp_path / "data").iterdir()] == ["train-00000-of-00001.parquet"]


def test_rows_of_shards_that_are_no_text_or_in_damaged_pages(tmp_path):
    folder = tmp_path / "set"
    write_known(folder, "BryanW/HumanEdit", 8, row_group_size=4)
    (shard,) = folder.glob("*.parquet")
    data = shard.read_bytes()
    texts = pq.read_table(shard)["EDITING_INSTRUCTION"].to_pylist()
    assert texts == list("01234567")
    table = pq.read_table(shard)
    column = pa.array([b"\xff" if x == "1" else x.encode() for x in texts]).view(pa.string())
    place = table.schema.get_field_index("EDITING_INSTRUCTION")
    pq.write_table(table.set_column(place, "EDITING_INSTRUCTION", column), shard, row_group_size=4)
    run(folder, tmp_path / "data", *KEPT)
    assert list(pairs_of(read_shards(tmp_path / "data"))) == list("0234567")
    assert left_out(tmp_path / "data") == {"damaged": 1}
    group = pq.read_metadata(shard).row_group(0)
    columns = map(group.column, range(group.num_columns))
    chunk = next(x for x in columns if x.path_in_schema == "OUTPUT_IMG.bytes")
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(shard.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    shard.write_bytes(data)
    run(folder, tmp_path / "damaged", *KEPT)
    assert list(pairs_of(read_shards(tmp_path / "damaged"))) == list("4567")
    assert left_out(tmp_path / "damaged") == {"damaged": 4}


def many_pairs(folder, count, mode="w", suffix=".tar"):
    """Pairs in two archives and a random order, some of them twice."""
    rng = np.random.default_rng(0)
    images = {f"{n}{kind}.png": encode(smooth(n * 2 + (kind == "b"), 32, 32))
              for n in range(count) for kind in "ab"}  # fmt: skip
    names = [str(x) for x in rng.permutation(list(images))]
    for number in range(2):
        members = [(name, images[name]) for name in names[number::2]]
        write_tar(folder / f"{number}{suffix}", members, mode)
    rows = rows_of(*[str(n) for n in range(count)])
    rows += [rows[int(n)] for n in rng.integers(0, count, count // 2)]
    write_lines(folder / "i.jsonl", [row | {"edit": "x"} for row in rows])


KILLED = """
import os, signal, sys
from diffusers_flax.data.archives import convert
import parquet_processing
convert.ROW_GROUP_ROWS, convert.SHARD_BYTES = 2, 4000
left = int(sys.argv.pop(1))
def trace(frame, event, arg):
    global left
    if event == "call" and "archives" in frame.f_code.co_filename:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.setprofile(trace)
parquet_processing.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix, mode", [(".tar", "w"), (".tar.gz", "w:gz")])
def test_kills_at_random_places_change_nothing(tmp_path, monkeypatch, suffix, mode):
    """Also with --drop, which remembers earlier pairs."""
    folder, out = tmp_path / "set", tmp_path / "data"
    many_pairs(folder, 24, mode, suffix)
    monkeypatch.setattr(convert, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(convert, "SHARD_BYTES", 4000)
    drop = ["--drop", "duplicate", "near_duplicate"]
    run(folder, tmp_path / "whole", *drop)
    flags = ["--pairs", folder, "--output_dir", out, "--preview", "", *drop]
    rng, kills = random.Random(0), 0
    for _ in range(40):
        is_planned = False
        if (database := out / ".unfinished" / "plan.sqlite").exists():
            with plan.Plan(database) as opened:
                is_planned = opened.get("planned")
        calls = rng.randrange(350, 900) if is_planned else rng.randrange(1000, 2500)
        code = [sys.executable, "-c", KILLED, str(calls), *map(str, flags)]
        ended = subprocess.run(code, env=ENVIRONMENT, timeout=60, capture_output=True, text=True)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        kills += 1
    assert kills > 2
    files = [{x.name: x.read_bytes() for x in y.iterdir()} for y in (tmp_path / "whole", out)]
    assert files[0] == files[1] and len(files[0]) > 5


def test_a_pair_at_the_start_of_a_shard_is_not_its_own_duplicate(tmp_path, monkeypatch):
    folder, out = tmp_path / "set", tmp_path / "data"
    many_pairs(folder, 8)
    monkeypatch.setattr(convert, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(convert, "SHARD_BYTES", 4000)
    run(folder, tmp_path / "whole", "--drop", "duplicate")
    close = convert.Shards._close_shard

    def interrupted(self, stop):
        close(self, stop)
        raise KeyboardInterrupt

    while not (out / "manifest.json").exists():
        with monkeypatch.context() as patch:
            patch.setattr(convert.Shards, "_close_shard", interrupted)
            with pytest.raises(SystemExit):
                run(folder, out, "--drop", "duplicate")
        if len(list((out / ".unfinished").glob("*.parquet"))) > 1:
            run(folder, out, "--drop", "duplicate")
    files = [{x.name: x.read_bytes() for x in y.iterdir()} for y in (tmp_path / "whole", out)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_same_command_goes_on(tmp_path):
    """A limit to the size of a file has the same effect as a full disk, but for the error."""
    folder, out = tmp_path / "set", tmp_path / "data"
    images = {
        f"{n}{kind}.bmp": encode(smooth(n, 64, 64), "BMP") for n in range(24) for kind in "ab"
    }
    write_tar(folder / "x.tar", images)
    write_lines(
        folder / "i.jsonl",
        [{"input": f"{n}a.bmp", "edited": f"{n}b.bmp", "edit": str(n)} for n in range(24)],
    )
    flags = ["--pairs", folder, "--output_dir", out, "--preview", ""]
    command = [sys.executable, parquet_processing.__file__, *map(str, flags)]

    limited = ["bash", "-c", 'ulimit -f 97 && exec "$@"', "bash", *command]  # 97 KiB
    ended = subprocess.run(limited, env=ENVIRONMENT, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("error: ") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(out.glob("*.parquet")) and not list((out / ".unfinished").glob("*.parquet"))
    assert subprocess.run(command, env=ENVIRONMENT, timeout=60).returncode == 0
    assert len(read_shards(out)) == 24
