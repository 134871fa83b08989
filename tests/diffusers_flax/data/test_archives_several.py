"""parquet_processing.py --pairs: a directory with several sets, or with a part of them."""

import json

from edit_sets import (
    make_set,
    pairs_of,
    read_shards,
    run,
    write_lines,
    write_parquet,
    write_tar,
)
from known_sets import plain


def rows_of(*names):
    """Rows of an index: the pair of each prefix."""
    return [{"input": f"{x}a.png", "edited": f"{x}b.png", "edit": f"of {x}".strip()} for x in names]


def write_images(folder, prefix, grey):
    """The pair of a prefix, as image files."""
    for kind, value in (("a", grey), ("b", 100 + grey)):
        file = folder / f"{prefix}{kind}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(plain(value))


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_an_index_does_not_take_files_of_another_set(tmp_path):
    """Two sets with the same names below one directory, packed or not; a file of one is missing."""
    for packed in (True, False):
        root, out = tmp_path / f"sets-{packed}", tmp_path / f"data-{packed}"
        for name, grey in (("cats", 0), ("dogs", 20)):
            here = root / name
            rows = rows_of("images/0/", "images/1/")
            rows = [row | {"edit": f"{name} {row['edit']}"} for row in rows]
            write_lines(here / "lists" / "metadata.jsonl", rows)
            if packed:
                members = {"images/0/a.png": plain(grey), "images/0/b.png": plain(100 + grey)}
                if name == "dogs":
                    members |= {"images/1/a.png": plain(21), "images/1/b.png": plain(121)}
                write_tar(here / "data" / "x.tar", members)
            else:
                write_images(here, "images/0/", grey)
                if name == "dogs":
                    write_images(here, "images/1/", 21)
        run(root, out, "--max_bad_fraction", "1")
        assert pairs_of(read_shards(out)) == {
            "cats of images/0/": (0, 100),
            "dogs of images/0/": (20, 120),
            "dogs of images/1/": (21, 121),
        }
        assert manifest_of(out)["left_out"]["no files here"]["count"] == 1


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
