"""parquet_processing.py --pairs: finished conversions, directories that are read and written."""

import errno
import json
import os

import pytest
from edit_sets import make_set, pairs_of, read_shards, refuse, run, split, write_lines, write_tar
from known_sets import plain

import parquet_processing
from diffusers_flax.data.archives import convert

NAME = "AILab-CVC/SEED-Data-Edit"


def content_of(folder):
    return {x.name: x.read_bytes() for x in folder.iterdir() if x.is_file()}


def refused(capsys, *args):
    """The error of the program."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        parquet_processing.main([str(arg) for arg in args])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_finished_conversion_says_so(tmp_path, capsys):
    make_set(NAME, tmp_path / "set")
    out = tmp_path / "data"
    run(tmp_path / "set", out)
    before = {x: x.stat().st_mtime_ns for x in out.iterdir()}
    (out / ".unfinished").mkdir()  # as a kill at the very end leaves it
    assert "run the same command of parquet_processing.py --pairs again" in refused(
        capsys, "--train_data_dir", out
    )
    for flags in ([], [], ["--overwrite_output_dir"]):
        if flags:
            (out / ".unfinished").mkdir()
        run(tmp_path / "set", out, *flags)
        assert f"{out} is finished: 11 pairs (shards: 2" in capsys.readouterr().out
        assert {x: x.stat().st_mtime_ns for x in out.iterdir()} == before
    flags = ["--pairs", tmp_path / "set", "--output_dir", out, "--preview", ""]
    assert "is not empty" in refused(capsys, *flags, "--max_pairs", "3")
    index = next((tmp_path / "set").rglob("*.jsonl"))
    os.utime(index, (1, 1))
    assert "have come, gone or changed since" in refused(capsys, *flags)
    next(out.glob("*.parquet")).unlink()
    assert "is not empty" in refused(capsys, *flags)
    run(tmp_path / "set", out, "--overwrite_output_dir")
    assert len(read_shards(out)) == 11


def test_a_full_disk_says_that_the_same_command_goes_on(tmp_path, capsys, monkeypatch):
    make_set(NAME, tmp_path / "set")

    def full(self, table):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(convert.pq.ParquetWriter, "write_table", full)
        error = refuse(tmp_path / "set", tmp_path / "data", capsys)
    assert "the disk is full; with free space, the same command goes on" in error
    run(tmp_path / "set", tmp_path / "data")
    assert len(read_shards(tmp_path / "data")) == 11


def test_what_is_read_is_never_deleted(tmp_path, capsys):
    make_set(NAME, tmp_path / "set")
    out = tmp_path / "data"
    run(tmp_path / "set", out)
    before = content_of(out)
    shard = next(out.glob("*.parquet"))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "x.parquet").symlink_to(shard)
    for source, words in (
        (out, f"--output_dir {out} is also --pairs"),
        (shard, "is the directory of --pairs"),
        (tmp_path / "links", "--overwrite_output_dir would delete"),
    ):
        flags = ["--pairs", source, "--output_dir", out, "--overwrite_output_dir"]
        assert words in refused(capsys, *flags, "--preview", "")
        assert content_of(out) == before and not (out / ".unfinished").exists()
    # The file of this name by script.py does not make downloaded shards the program's own.
    files = [{"file": shard.name, "size": 1, "rows": 1, "url": "http://x"}]
    (out / "manifest.json").write_text(json.dumps({"files": files}))
    before = content_of(out)
    flags = ["--pairs", tmp_path / "set", "--output_dir", out, "--overwrite_output_dir"]
    assert "is not empty" in refused(capsys, *flags)
    assert content_of(out) == before


def test_an_incomplete_conversion_names_its_command(tmp_path, capsys, monkeypatch):
    make_set(NAME, tmp_path / "set")
    write_tar(tmp_path / "other" / "x.tar", {"a.png": plain(1)})
    out = tmp_path / "data"
    # Without a shard, another command simply begins again.
    assert "has no pair" in refuse(tmp_path / "other", out, capsys)
    monkeypatch.setattr(convert, "finish", lambda *args: 1 / 0)
    with pytest.raises(SystemExit):
        run(tmp_path / "set", out)
    monkeypatch.undo()
    error = refused(capsys, "--train_data_dir", out)
    assert "run the same command of parquet_processing.py --pairs again" in error
    assert "remove" not in error
    error = refuse(tmp_path / "set", out, capsys, "--max_pairs", "3")
    assert "max_pairs was None and is 3" in error and "remove" not in error
    run(tmp_path / "set", out)
    assert len(read_shards(out)) == 11


def test_filtered_shards_keep_set_and_licence(tmp_path, capsys):
    pairs = make_set(NAME, tmp_path / "set")
    run(tmp_path / "set", tmp_path / "data")
    capsys.readouterr()
    run(tmp_path / "data", tmp_path / "clean", "--drop", "unreadable")
    printed = capsys.readouterr().out
    assert f"set         {NAME} by its columns, CC-BY-NC-4.0" in printed
    assert printed.count("licence     CC-BY-NC-4.0 forbids commercial use") == 3
    assert "timbrooks" not in printed and "not read" not in printed
    manifests = [
        json.loads((tmp_path / x / "manifest.json").read_text()) for x in ("data", "clean")
    ]
    assert manifests[0]["sets"] == manifests[1]["sets"] and len(manifests[0]["sets"]) == 2
    assert pairs_of(read_shards(tmp_path / "clean")) == pairs


def test_programs_that_are_given_the_other_ones_directory(tmp_path, capsys):
    root = tmp_path / "set"
    make_set("OPPOer/X2Edit-Dataset", root / "x2edit")
    error = refused(capsys, "--train_data_dir", root)
    assert "contains x2edit/X2Edit_data/textflux/000/00000.tar and no shards" in error
    make_set("sysuyy/ImgEdit", root)
    error = refused(capsys, "--train_data_dir", root / "Parquet")
    assert "if it is the index of archives, make shards with parquet_processing.py --pairs" in error
    error = refused(capsys, "--pairs", "hf://datasets/a/b", "--output_dir", tmp_path / "data")
    assert "is a URL; download it first: script.py --dataset OWNER/NAME" in error


def test_what_is_missing_is_named(tmp_path, capsys):
    """No index, an index with other keys, an index without archives, parts, other files."""
    root = tmp_path / "set"
    make_set("sysuyy/ImgEdit", root)
    error = refuse(root / "Parquet" / "add_part0.parquet", tmp_path / "a", capsys)
    assert f"{root / 'Parquet'} has no archive; name a directory that has the index" in error
    indexes = {file: file.read_bytes() for file in (root / "Parquet").iterdir()}
    for file in indexes:
        file.unlink()
    rows = [{"inputs": "a.png", "outputs": "b.png", "text": "x"}] * 3
    write_lines(root / "Parquet" / "add.jsonl", rows)
    error = refuse(root, tmp_path / "b", capsys)
    assert "no index (.jsonl, .json, .parquet) with keys such as input, edited and edit" in error
    assert (
        "add.jsonl: no known keys of images and instruction (inputs, outputs, text), 3 rows"
        in error
    )
    for file, data in indexes.items():
        file.write_bytes(data)
    run(root, tmp_path / "c")
    assert "add.jsonl: no known keys" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["not_read"][0].endswith("(inputs, outputs, text), 3 rows")
    # The last part of one archive, the first of another one, and files that are no archives.
    parts = sorted((root / "Singleturn").iterdir())
    parts[-1].unlink()
    members = {f"{n}.png": plain(n) for n in range(3)}
    split(write_tar(root / "first.tar", members), [f".{k:03d}" for k in range(3)])
    (root / "first.tar.000").unlink()
    (root / "lfs.tar").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (root / "page.tar").write_text("<html>not found</html>" * 99)
    error = refuse(root, tmp_path / "d", capsys)
    assert "4 archives cannot be read: " in error
    for words in (
        "its parts here are add_part0.tar.split.000 to add_part0.tar.split.001",
        "its parts here are first.tar.001 to first.tar.002",
        "it is a Git LFS pointer",
        "it is a web page",
    ):
        assert words in error, words
