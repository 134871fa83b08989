"""diffusers_flax/data/pairs.py: written shards, refused input, interruptions."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps
from shards import edits_of_jsonl, open_pairs, write_list

import parquet_processing
from diffusers_flax.data import lists, pairs, writing
from diffusers_flax.data.archives.flags import PairsFlags
from diffusers_flax.data.pairs import write_pairs

ORIENTATION = 0x0112
HEADER = "input,edit,edited\n"


def save(path, seed=0, size=(16, 16), mode="RGB", orientation=None, **options):
    """Save a noise image in the format of the file extension."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8)).convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(rng.integers(0, 256, size[::-1], np.uint8)))
    if orientation:
        options["exif"] = image.getexif()
        options["exif"][ORIENTATION] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def make_pairs(folder, count, edits=1):
    """Write `count` originals with a few edits each, and their list."""
    rows = []
    for n in range(count):
        save(folder / f"images/{n}.jpg", n)
        for k in range(edits):
            save(folder / f"images/{n}-{k}.png", 100 * k + n)
            rows.append({"input": f"images/{n}.jpg", "edit": f"edit {k} of {n}"})
            rows[-1]["edited"] = f"images/{n}-{k}.png"
    return write_list(folder / "pairs.jsonl", rows)


def read(folder):
    """Read the rows of all shards in order."""
    return [row for path in sorted(folder.iterdir()) for row in pq.read_table(path).to_pylist()]


def main(*flags):
    parquet_processing.main(["--preview", "", *map(str, flags)])


def error_of(capsys, *flags, code=2):
    with pytest.raises(SystemExit) as stop:
        main(*flags)
    assert stop.value.code == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


KINDS = [
    {"name": "a.jpg"},
    {"name": "b.jpg", "orientation": 6},
    {"name": "c.jpg", "mode": "L", "orientation": 3},
    {"name": "d.png"},
    {"name": "e.png", "mode": "P"},
    {"name": "f.png", "mode": "RGBA"},
    {"name": "g.png", "mode": "L", "orientation": 8},
    {"name": "h.webp", "lossless": True},
    {"name": "i.webp", "lossless": True, "orientation": 5},
    {"name": "j.tiff", "mode": "CMYK"},
]


@pytest.mark.parametrize("form", ["pairs.jsonl", "pairs.csv", "captions.jsonl", "captions.csv"])
def test_bytes_are_copied_and_read_upright(tmp_path, capsys, form):
    source, rows, names = tmp_path / "own", [], []
    for n, kind in enumerate(KINDS):
        original = save(source / "original" / kind["name"], n, **{**kind, "name": None})
        # Edited images with the same aspect ratio but another size, format and extension.
        edited = save(source / "edited" / f"{original.stem}.webp", 50 + n, (32, 32), lossless=True)
        names.append((original, edited))
        text = f'line\nof "{n}", \x0b\u2028 ö'
        rows.append({"original_caption": f"a {n}", "instruction": f" {text} ", "edited_prompt": ""})
        if form.startswith("captions"):
            rows[-1] = {"file_name": original.stem if n % 2 else original.name} | rows[-1]
        else:
            rows[-1] |= {"original": f"original/{original.name}", "edited": str(edited)}
    file = write_list(source / form, rows)
    data = tmp_path / "data"
    main("--pairs", source if form.startswith("captions") else file, "--output_dir", data)
    out = capsys.readouterr().out
    assert out.startswith(f"wrote {len(KINDS)} pairs to {data} (shards: 1)\nshards      1, ")
    assert "unreadable  0 of 10 rows" in out

    assert [path.name for path in data.iterdir()] == ["train-00000-of-00001.parquet"]
    for n, (row, (original, edited)) in enumerate(zip(read(data), names)):
        assert row == {
            "original_prompt": f"a {n}",
            "original_image": {"bytes": original.read_bytes(), "path": original.name},
            "edit_prompt": f'line\nof "{n}", \x0b\u2028 ö',
            "edited_prompt": None,
            "edited_image": {"bytes": edited.read_bytes(), "path": edited.name},
        }
    options = {"random_crop": False, "random_flip": False, "shuffle_buffer": 0}
    (batch,) = open_pairs(data, batch_size=len(KINDS), resolution=16, **options)
    pixels = dict(zip(batch["edit_prompt"], batch["original_pixel_values"]))
    for n, (original, _) in enumerate(names):
        upright = ImageOps.exif_transpose(Image.open(original)).convert("RGBA")
        expected = Image.alpha_composite(Image.new("RGBA", (16, 16), "white"), upright)
        loaded = pixels[f'line\nof "{n}", \x0b\u2028 ö']
        np.testing.assert_array_equal(loaded, np.asarray(expected.convert("RGB")))


def test_turned_images_are_compared_upright(tmp_path):
    """An image rotated by EXIF and its upright edit have the same aspect ratio."""
    save(tmp_path / "a.jpg", size=(64, 48), orientation=6)
    save(tmp_path / "b.png", size=(24, 32))
    save(tmp_path / "c.png", size=(32, 24))
    row = {"input": "a.jpg", "edit": "x", "edited": "b.png"}
    write_pairs(write_list(tmp_path / "ok.jsonl", [row]), tmp_path / "data", PairsFlags())
    file = write_list(tmp_path / "bad.jsonl", [row | {"edited": "c.png"}])
    with pytest.raises(ValueError, match=r"a\.jpg has 48x64 .*c\.png 32x24; crop one of them"):
        write_pairs(file, tmp_path / "other", PairsFlags())


def test_row_groups_and_shards(tmp_path, monkeypatch):
    file = make_pairs(tmp_path, 11)
    row_bytes = len((tmp_path / "images/0.jpg").read_bytes()) + 900  # slightly more than one pair
    monkeypatch.setattr(writing, "ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(writing, "SHARD_BYTES", 6 * row_bytes)
    write_pairs(file, tmp_path / "by_rows", PairsFlags())
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 2 * row_bytes)
    write_pairs(file, tmp_path / "by_bytes", PairsFlags(max_pairs=5))
    sizes = {}
    for name in ("by_rows", "by_bytes"):
        shards = [(path.name, pq.read_metadata(path)) for path in (tmp_path / name).iterdir()]
        sizes[name] = {
            shard: [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            for shard, metadata in shards
        }
    assert sizes == {
        "by_rows": {
            "train-00000-of-00002.parquet": [3, 3],
            "train-00001-of-00002.parquet": [3, 2],
        },
        "by_bytes": {"train-00000-of-00001.parquet": [2, 2, 1]},
    }
    prompts = [row["edit_prompt"] for row in read(tmp_path / "by_rows")]
    assert prompts == [f"edit 0 of {n}" for n in range(11)]


def test_held_out_images_are_in_no_shard(tmp_path, monkeypatch, capsys):
    """Nor are copies of them."""
    monkeypatch.chdir(tmp_path)
    file = make_pairs(tmp_path, 12, edits=2)
    for n in range(12):
        shutil.copy(f"images/{n}.jpg", f"images/copy-{n}.jpg")
    lines = file.read_text().splitlines()
    lines[1::2] = [x.replace('"images/', '"images/copy-', 1) for x in lines[1::2]]
    file.write_text("\n".join(lines))

    def part(name, seed):
        main(
            "--pairs", "pairs.jsonl", "--output_dir", f"data-{name}", "--num_held_out", 3,
            "--held_out_dir", f"held-{name}", "--seed", seed,
        )  # fmt: skip
        return edits_of_jsonl(Path(f"held-{name}/edits.jsonl"))

    edits = part("a", 0)
    assert "held out 6 pairs: held-a/edits.jsonl" in capsys.readouterr().out
    assert [edit.output.name for edit in edits] == [f"{n:05d}.png" for n in range(6)]
    held_out = {edit.instruction for edit in edits}
    trained = {row["edit_prompt"] for row in read(tmp_path / "data-a")}
    assert len(held_out) == 6 and len(trained) == 18
    assert {text[-2:] for text in held_out}.isdisjoint(text[-2:] for text in trained)
    for edit in edits:
        k, n = edit.instruction.split()[1::2]
        assert edit.input.read_bytes() == Path(f"images/{n}.jpg").read_bytes()
        truth = Path("held-a/edited", edit.output.name)
        assert truth.read_bytes() == Path(f"images/{n}-{k}.png").read_bytes()
    Path("held-a").rename("moved")  # paths are relative to the list
    moved = edits_of_jsonl(Path("moved/edits.jsonl"))
    assert [edit.input.is_file() for edit in moved] == [True] * 6
    assert {edit.instruction for edit in part("again", 0)} == held_out
    assert {edit.instruction for edit in part("other", 1)} != held_out
    with pytest.raises(ValueError, match="--num_held_out 12 must be less than the 12 original"):
        write_pairs(Path("pairs.jsonl"), Path("x"), PairsFlags(num_held_out=12, held_out_dir="y"))


def test_masks_go_with_their_pairs(tmp_path, capsys):
    """Into the shards, for --mask_loss_weight, and beside held-out pairs."""
    rows = []
    for n in range(6):
        for name in ("input", "edited"):
            save(tmp_path / f"{name}-{n}.png", n)
        rows.append({"input": f"input-{n}.png", "edit": str(n), "edited": f"edited-{n}.png"})
        if n % 2:
            rows[-1]["mask"] = save(tmp_path / f"mask-{n}.png", n, mode="L").name
    file = write_list(tmp_path / "pairs.jsonl", rows)
    held = tmp_path / "held"
    main(
        *("--pairs", file, "--output_dir", tmp_path / "data"),
        *("--num_held_out", 2, "--held_out_dir", held, "--seed", 1),
    )
    assert "mask_image: struct" in capsys.readouterr().out
    trained = read(tmp_path / "data")
    kept = [json.loads(line) for line in (held / "edits.jsonl").read_text().splitlines()]
    assert len(trained) == 4 and len(kept) == 2
    for n, mask in [(row["edit_prompt"], row["mask_image"]) for row in trained]:
        data = (tmp_path / f"mask-{n}.png").read_bytes() if int(n) % 2 else None
        assert mask == (data and {"bytes": data, "path": f"mask-{n}.png"})
    for row in kept:
        n = int(row["edit"])
        assert ("mask" in row) == bool(n % 2)
        if n % 2:
            assert (held / row["mask"]).read_bytes() == (tmp_path / f"mask-{n}.png").read_bytes()
    save(tmp_path / "mask-1.png", size=(24, 16), mode="L")
    (tmp_path / "mask-3.png").write_bytes(b"no image")
    (tmp_path / "mask-5.png").unlink()
    Image.new("L", (16, 16), 127).save(tmp_path / "mask-black.png")
    rows[0]["mask"] = "mask-black.png"
    write_list(file, rows)
    error = error_of(capsys, "--pairs", file, "--output_dir", tmp_path / "other")
    assert "4 problems: line 1: " in error and "mask-black.png has no white, so" in error
    assert "line 2: the mask has 24x16" in error and "mask-5.png does not exist" in error
    assert "line 4: mask: no known image format" in error


def test_all_problems_are_told_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    for name in ("good.png", "edited.png"):
        save(tmp_path / name)
    save(tmp_path / "wide.png", size=(24, 16))
    (tmp_path / "cut.jpg").write_bytes(save(tmp_path / "whole.jpg").read_bytes()[:-40])
    (tmp_path / "empty.png").touch()
    good = {"input": "good.png", "edit": "red", "edited": "edited.png"}
    rows = [
        (good, None),
        (good | {"input": "gone.png"}, "gone.png does not exist"),
        (good | {"input": "."}, "does not exist"),
        (good | {"edit": 3}, "edit is 3, not text"),
        (good | {"input": "cut.jpg"}, "cut.jpg: Premature end of JPEG file"),
        (good | {"edited": "empty.png"}, "empty.png: no known image format (0 bytes)"),
        (good | {"edited": "wide.png"}, "wide.png 24x16; crop one of them to"),
        (good | {"edit": " \n"}, "edit is empty"),
        (good | {"edit": ["red"]}, "not text"),
        ({"input": "good.png", "edit": "x"}, "no edited_image or output_image or edited or truth"),
        ("{", "not JSON (Expecting property name"),
        ("[1]", "not a JSON object"),
    ]
    texts = [row if isinstance(row, str) else json.dumps(row) for row, _ in rows]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\r\n".join(texts))
    flags = ("--pairs", file, "--output_dir", tmp_path / "data")
    count = len(rows) - 1
    assert error_of(capsys, *flags).endswith(f"; and {count - 10} more\n")
    monkeypatch.setattr(lists, "MAX_NAMED_PROBLEMS", 99)
    told = error_of(capsys, *flags).strip().partition("problems: ")[2].split("; line ")
    assert len(told) == count
    for line, (problem, (_, expected)) in enumerate(zip(told, rows[1:]), start=2):
        assert problem.removeprefix("line ").startswith(f"{line}: ") and expected in problem
    assert not (tmp_path / "data").exists()
    main(*flags, "--max_pairs", 1)  # the first row is valid
    assert len(read(tmp_path / "data")) == 1


@pytest.mark.variants
@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.csv", f"{HEADER}1,2\n", "line 2: too few or many values; put texts with commas"),
        ("a.csv", HEADER, "a.csv has no rows"),
        ("a.jsonl", b"{}\n{}\n\xff", "a.jsonl cannot be read ('utf-8' codec"),
        ("a.txt", "x", "a.txt must be a .jsonl or .csv file, or a directory with original/"),
    ],
)  # fmt: skip
def test_bad_lists(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in error_of(capsys, "--pairs", tmp_path / name, "--output_dir", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_earlier_output_is_replaced_on_request_and_nothing_else(tmp_path):
    file = make_pairs(tmp_path / "own", 4)
    folders = [tmp_path / "data", tmp_path / "held"]
    write_pairs(file, folders[0], PairsFlags(num_held_out=1, held_out_dir=folders[1]))
    (folders[0] / "notes.txt").write_text("mine")
    (folders[1] / "results").mkdir()
    flags = partial(PairsFlags, num_held_out=2, held_out_dir=folders[1])
    with pytest.raises(ValueError, match=r"data is not empty .* with --overwrite_output_dir"):
        write_pairs(file, folders[0], flags())
    write_pairs(file, folders[0], flags(overwrite_output_dir=True))
    assert len(read_shards(folders[0])) == 2
    assert len(edits_of_jsonl(folders[1] / "edits.jsonl")) == 2
    assert (folders[0] / "notes.txt").exists() and (folders[1] / "results").exists()

    (folders[0] / "other.parquet").touch()
    with pytest.raises(ValueError, match=r"data is not empty \(other.parquet\)"):
        write_pairs(file, folders[0], flags(overwrite_output_dir=True))


def read_shards(folder):
    return [row for path in folder.glob("*.parquet") for row in pq.read_table(path).to_pylist()]


def test_hidden_files_do_not_count(tmp_path):
    """Among the images, where macOS writes ._NAME beside NAME, and in the output directory."""
    source, data = tmp_path / "own", tmp_path / "data"
    data.mkdir()
    (data / ".DS_Store").touch()
    for n, name in enumerate(("original/a.png", "edited/a.png")):
        path = save(source / name, n)
        path.with_name(f"._{path.name}").write_bytes(b"of macOS")
    write_list(source / "captions.jsonl", [{"name": "a", "edit": "x"}])
    write_pairs(source, data, PairsFlags())
    assert len(read_shards(data)) == 1


def test_bad_directories(tmp_path, capsys):
    flags = ("--pairs", tmp_path, "--output_dir", tmp_path / "data")
    for name in ("original/a.png", "original/b.png", "original/b.jpg", "edited/a.jpg"):
        save(tmp_path / name)
    assert "or a directory with original/, edited/ and captions" in error_of(capsys, *flags)
    rows = [{"name": "a", "edit": "x"}, {"name": "b", "edit": "x"}, {"name": "b.jpg", "edit": "x"}]
    write_list(tmp_path / "captions.csv", rows)
    error = error_of(capsys, *flags)
    assert "captions.csv has 3 problems: line 3: no or several images in edited/" in error
    assert "line 4: no or several images in edited/ are named b.jpg" in error


@pytest.mark.variants
@pytest.mark.parametrize(
    "flags, words",
    [
        ("", "give --train_data_dir DIR to describe shards, or --pairs LIST --output_dir DIR"),
        ("--train_data_dir data --max_pairs 5", "--max_pairs goes with --pairs"),
        ("--pairs a.csv --output_dir x --num_held_out 5", "go together"),
        ("--pairs a.csv --output_dir full", "--output_dir full is not empty (x.parquet)"),
        ("--pairs a.csv --output_dir x --preview x.txt", "x.txt is no image; name it .png or .jpg"),
        (
            "--pairs a.csv --output_dir x --held_out_dir ./x --num_held_out 1",
            "--held_out_dir x is also --output_dir",
        ),
    ],
)
def test_flags(tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x.parquet").touch()
    assert words in error_of(capsys, *flags.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("stop_at", ["problem_of", "image_cell", "write_bytes"])
def test_interrupt_leaves_nothing(tmp_path, monkeypatch, capsys, stop_at):
    file = make_pairs(tmp_path, 6)
    monkeypatch.setattr(writing, "ROW_GROUP_ROWS", 1)
    monkeypatch.setattr(writing, "SHARD_BYTES", 1)
    owner = {"write_bytes": Path}.get(stop_at, pairs)
    real, calls = getattr(owner, stop_at), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # like Ctrl-C
        return real(*args)

    monkeypatch.setattr(owner, stop_at, interrupted)
    data, held_out = tmp_path / "data", tmp_path / "new/held_out"
    data.mkdir()
    flags = ("--pairs", file, "--output_dir", data, "--held_out_dir", held_out)
    error = error_of(capsys, *flags, "--num_held_out", 2, code=130)
    assert error == "interrupted; run the same command again\n"
    assert len(calls) >= 3 and not any(data.iterdir()) and not any(held_out.glob("*"))
    monkeypatch.undo()
    main(*flags, "--num_held_out", 2)
    assert len(read(data)) == 4
