"""Files of sets with archives: hostile archives, parts, indexes, paths, masks of run lengths."""

import gzip
import io
import json
import os
import tarfile

import numpy as np
import pytest
from edit_sets import (
    make_set,
    manifest_of,
    num_left_out,
    pairs_of,
    read_shards,
    refuse,
    run,
    split,
    write_lines,
    write_parquet,
    write_tar,
)
from known_sets import plain
from PIL import Image

from diffusers_flax.data.archives import masks, tar
from diffusers_flax.data.images import decode_mask

KEPT = ("--max_bad_fraction", "1")


def rows_of(*names):
    """Rows of an index: the pair of each prefix."""
    return [{"input": f"{x}a.png", "edited": f"{x}b.png", "edit": f"of {x}".strip()} for x in names]


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


GOOD = tar_bytes(member("a.input.png"))
NOISE = tar_bytes(member("x.png", 60_000), content=os.urandom(60_000))
DAMAGED = gzip.compress(NOISE)[:30_000] + b"x" + gzip.compress(NOISE, mtime=0)[30_001:]
DAMAGE = ("truncated", "without", "garbage", "empty", "damaged")
HOSTILE = {
    "absolute": tar_bytes(member("/etc/passwd")),
    "parent": tar_bytes(member("a/../../x.png")),
    "hard link": tar_bytes(member("x", 0, type=tarfile.LNKTYPE, linkname="y")),
    "device": tar_bytes(member("x.png", 0, type=tarfile.CHRTYPE)),
    "huge": member("x.png", 1 << 40).tobuf() + bytes(1024),
    "truncated content": GOOD[:514],
    "truncated header": GOOD[:1024] + GOOD[:100],
    "without an end": GOOD[:1024],
    "garbage after": GOOD[:1024] + b"x" * 1024,
    "empty": b"",
    "gzip truncated": gzip.compress(GOOD, mtime=0)[:-20],
    "gzip damaged": DAMAGED,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_by_name(tmp_path, capsys, kind):
    folder = tmp_path / "set"
    good = {"0.input.png": plain(1), "0.output.png": plain(2), "0.txt": b"x"}
    write_tar(folder / "good.tar", good)
    name = "hostile.tar.gz" if "gzip" in kind else "hostile.tar"
    (folder / name).write_bytes(HOSTILE[kind])
    error = refuse(folder, tmp_path / "data", capsys)
    words = "is damaged" if any(x in kind for x in DAMAGE) else "is not an image of this archive"
    assert name in error and words in error
    (folder / name).unlink()  # and the same command goes on without it
    run(folder, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == {"x": (1, 2)}


@pytest.mark.parametrize(
    "suffixes, is_whole",
    [
        ([".000", ".002"], False),
        ([".split.001", ".split.002"], True),
        ([".split.002", ".split.003"], False),
        (["", ".000"], False),
        ([f".part{n}" for n in range(12)], True),
        ([f".{'abcdefghijklmnopqrstuvwxyz'[n // 26]}{chr(97 + n % 26)}" for n in range(30)], True),
    ],
)
def test_parts(tmp_path, capsys, suffixes, is_whole):
    folder = tmp_path / "set"
    members = {"0.source.png": plain(1), "0.target.png": plain(2), "0.txt": b"make it 2"}
    file = write_tar(folder / "x.tar", members)
    if "" in suffixes:
        (folder / "x.tar.000").touch()
    else:
        split(file, suffixes)
    (folder / "x.tar.asc").write_bytes(b"a signature")
    if is_whole:
        run(folder, tmp_path / "data")
        assert pairs_of(read_shards(tmp_path / "data")) == {"make it 2": (1, 2)}
    else:
        assert "x.tar: a part is missing" in refuse(folder, tmp_path / "data", capsys)


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
    assert "has no pair that can be used" in error
    # The name of the archive decides, whichever comes first.
    (folder / "x.tar").rename(folder / "dogs.tar")
    run(folder, tmp_path / "named")
    assert pairs_of(read_shards(tmp_path / "named")) == {"of dogs/": (1, 2)}
    assert num_left_out(tmp_path / "named") == {"no files here": 1}


def test_equal_names(tmp_path, capsys):
    """The last one of an archive, the one in the edited image's archive, or none."""
    folder = tmp_path / "set"
    members = [("in.png", plain(9)), ("in.png", plain(1)), ("out_a.png", plain(2))]
    write_tar(folder / "a.tar", members)
    write_tar(folder / "b.tar", {"in.png": plain(3), "out_b.png": plain(4)})
    write_tar(folder / "c.tar", {"out_c.png": plain(5)})
    rows = [{"input": "in.png", "edited": f"out_{k}.png", "edit": k} for k in "abc"]
    write_lines(folder / "i.jsonl", rows)
    run(folder, tmp_path / "data", "--max_bad_fraction", "0.5")
    assert pairs_of(read_shards(tmp_path / "data")) == {"a": (1, 2), "b": (3, 4)}
    assert "in.png is in a.tar (in.png) and b.tar (in.png)" in capsys.readouterr().out
    for n in (1, 11):
        write_tar(tmp_path / "hints" / f"{n}.tar", {"s.png": plain(n), f"{n}.png": plain(100 + n)})
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
    {"input": "a.png", "edited": "b.png", "edit": {"a": 1}},
    {"input": "a.png", "edited": "b.png", "edit": "half a \ud83d letter"},
    {"input": "a.png", "edited": "b.png", "edit": "x", "mask": {"counts": "~" * 99_999}},
    {"input": "a.png", "edited": "b.png", "edit": "x", "mask": {"size": [0, 0], "counts": []}},
    {"input": "a\0.png", "edited": "b\n.png", "edit": "x"},
    {"edited": "b.png", "edit": "x"},
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
    assert sum(num_left_out(tmp_path / "data").values()) == len(ODD)
    assert "line 9: b .png is in no" in capsys.readouterr().out


def test_keys_of_a_set_with_more_keys(tmp_path, capsys):
    """Masks and second images stay; data is no set by itself."""
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


def test_indexes_that_are_damaged_are_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"a.png": plain(1), "b.png": plain(2)})
    write_parquet(folder / "i.parquet", rows_of("") * 999)
    damaged = (folder / "i.parquet").read_bytes()[:-9]
    (folder / "i.parquet").unlink()
    lines = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows_of("") * 999))
    for name, data in (
        ("i.parquet", damaged),
        ("i.jsonl.gz", lines[:-9]),
        ("i.json", b'[{"input": "a.png", '),
    ):
        (folder / name).write_bytes(data)
        assert f"{name} " in refuse(folder, tmp_path / f"data-{name}", capsys), name
        (folder / name).unlink()


def test_names_with_line_ends_and_bytes_that_are_no_text(tmp_path):
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


def test_an_array_of_json_is_an_index(tmp_path):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"a.png": plain(1), "b.png": plain(2)})
    with gzip.open(folder / "i.json.gz", "wt") as file:
        json.dump(rows_of(""), file, indent=1)
    run(folder, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == {"of": (1, 2)}


def test_a_member_that_is_missing_is_no_member_of_the_other_archive(tmp_path):
    """ImgEdit with a second archive of the same names but for the first directory."""
    root = tmp_path / "set"
    pairs = make_set("sysuyy/ImgEdit", root)
    rows, members = [], {}
    for n in range(8):
        base = f"results_add_part1/{n:05d}"
        members |= {f"{base}/original.png": plain(30 + n), f"{base}/result.png": plain(130 + n)}
        row = {"input_images": [f"{base}/original.png"], "output_images": [f"{base}/result.png"]}
        rows.append(row | {"prompt": f"part 1 {n}"})
        pairs[f"part 1 {n}"] = (30 + n, 130 + n)
    write_parquet(root / "Parquet" / "add_part1.parquet", rows)
    del members["results_add_part1/00003/result.png"], pairs["part 1 3"]
    write_tar(root / "Singleturn" / "add_part1.tar", members)
    run(root, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == pairs
    found = manifest_of(tmp_path / "data")["left_out"]
    assert found["a file is missing"]["examples"] == [
        "add_part1.parquet row 4: results_add_part1/00003/result.png is in no archive or directory"
    ]
    for part in (root / "Singleturn").glob("add_part0*"):
        part.unlink()
    run(root, tmp_path / "part")
    kept = {text: greys for text, greys in pairs.items() if not text.startswith("add")}
    assert pairs_of(read_shards(tmp_path / "part")) == kept and len(kept) == 9
    assert manifest_of(tmp_path / "part")["left_out"]["no files here"]["count"] == 8


def test_a_webdataset_beside_an_index_is_read_too(tmp_path, capsys):
    root = tmp_path / "sets"
    pairs = make_set("sysuyy/ImgEdit", root / "imgedit") | make_set("OPPOer/X2Edit-Dataset", root)
    write_tar(root / "other.tar", {f"results_other/{n}.png": plain(n) for n in range(3)})
    run(root, tmp_path / "data")
    assert pairs_of(read_shards(tmp_path / "data")) == pairs
    printed = capsys.readouterr().out
    assert "set         OPPOer/X2Edit-Dataset" in printed
    assert "not read    1 archives with files that no index here names: other.tar" in printed
    assert manifest_of(tmp_path / "data")["not_read"] == ["other.tar"]


def test_masks_of_run_lengths(tmp_path):
    """[height, width], columns first; the text has 5 bits of a number in a character."""
    grid = np.zeros((5, 7), bool)
    grid[1:4, 2:6] = True
    counts = [11, 3, 2, 3, 2, 3, 2, 3, 6]  # outside and inside in turn
    # Source: rleToString of cocoapi's maskApi.c; from the fourth on, differences to two before.
    assert masks.decode_counts("02203") == [0, 2, 2, 2, 5]
    assert masks.decode_counts("R1") == [34] and masks.decode_counts("0042N") == [0, 0, 4, 2, 2]
    mask = masks.run_lengths_to_png({"size": [5, 7], "counts": counts})
    assert (np.asarray(Image.open(io.BytesIO(mask))) == grid * 255).all()
    with pytest.raises(ValueError, match="do not fill 7x5"):
        masks.run_lengths_to_png({"size": [5, 7], "counts": counts[:-1]})
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {"a.png": plain(1, (5, 7)), "b.png": plain(2, (5, 7))})
    row = {"input_images": ["a.png"], "output_images": ["b.png"], "prompt": "x"}
    write_lines(folder / "i.jsonl", [row | {"mask": {"size": [5, 7], "counts": counts}}])
    run(folder, tmp_path / "data")
    (row,) = read_shards(tmp_path / "data")
    assert (decode_mask(row["mask_image"]["bytes"]) == grid * 255).all()


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
        with tar.Parts(found.parts) as parts, tarfile.open(file) as archive:
            ours = {name: parts.at(at, size) for at, size, name in tar.list_members(found)}
            theirs = {x.name: archive.extractfile(x).read() for x in archive if x.isreg()}
        assert ours == {name.removeprefix("./"): data for name, data in theirs.items()}
