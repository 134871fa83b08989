"""Lists of edits: parquet_processing.py, edit_cli.py and evaluate_edits.py read the same ones."""

import itertools
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import ROOT
from PIL import Image
from shards import ListedEdit, edits_of_jsonl, write_list

import edit_cli
import parquet_processing
from diffusers_flax.data.archives.flags import PairsFlags
from diffusers_flax.data.lists import NAMES, read_objects
from diffusers_flax.data.pairs import write_pairs
from diffusers_flax.evaluation import held_out
from diffusers_flax.evaluation.held_out import pairs_of_jsonl


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """A working directory, and beside it a directory of images named after their colour."""
    for name in ("work", "lists"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")


def paint(path, color):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), color).save(path)
    return path.read_bytes()


def shards(file, folder):
    """The rows of the shards that parquet_processing.py --pairs writes."""
    write_pairs(file, folder, PairsFlags())
    return pq.read_table(folder).to_pylist()


def read_by_all(file, folder):
    """(original, edited, instruction, captions) of a list's only row as each program reads it."""
    (row,) = shards(file, folder)
    (pair,) = pairs_of_jsonl(file)
    (edit,) = edits_of_jsonl(file)
    captions = (row["original_prompt"], row["edited_prompt"])
    assert captions == (pair.original_caption, pair.edited_caption)
    images = row["original_image"]["bytes"], row["edited_image"]["bytes"]
    assert images == (pair.original, pair.edited) and edit.input.read_bytes() == pair.original
    assert row["edit_prompt"] == pair.instruction == edit.instruction
    return (*images, pair.instruction, captions), edit.output


def test_training_on_the_held_out_list_takes_the_truth(tmp_path):
    """Not what the model has written to `output`."""
    truths, rows = {}, []
    for n in range(4):
        paint(tmp_path / f"lists/{n}.png", (n, 0, 0))
        truths[f"edit {n}"] = paint(tmp_path / f"lists/{n}-edited.png", (0, n, 0))
        rows.append({"input": f"{n}.png", "edit": f"edit {n}", "edited": f"{n}-edited.png"})
    file = write_list(tmp_path / "lists/pairs.jsonl", rows)
    write_pairs(file, Path("data"), PairsFlags(num_held_out=2, held_out_dir="held_out"))
    held_out = Path("held_out/edits.jsonl")
    for edit in edits_of_jsonl(held_out):
        paint(edit.output, "blue")
    found = shards(held_out, Path("again"))
    assert len(found) == 2
    assert all(row["edited_image"]["bytes"] == truths[row["edit_prompt"]] for row in found)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_every_name_means_the_same_to_every_program(tmp_path, suffix):
    before, after = (paint(tmp_path / f"lists/{name}.png", name) for name in ("red", "blue"))
    values = {
        "original_image": "red.png", "edited_image": "blue.png", "edit_prompt": "make it blue",
        "output": "out/0.png", "original_prompt": "a red wall", "edited_prompt": "a blue wall",
    }  # fmt: skip
    names = [NAMES[key] for key in values]
    for n, chosen in enumerate(itertools.islice(zip(*map(itertools.cycle, names)), 4)):
        row = dict(zip(chosen, values.values())) | {"other": "ignored"}
        file = write_list(tmp_path / f"lists/{n}{suffix}", [row])
        found, output = read_by_all(file, Path(f"data-{n}"))
        assert found == (before, after, "make it blue", ("a red wall", "a blue wall"))
        assert output == tmp_path / "lists/out/0.png"


def test_paths_are_relative_to_the_list_before_the_working_directory(tmp_path, caplog):
    row = {"input": "in.png", "edit": "x", "edited": "truth.png", "output": "out/0.png"}
    file = write_list(tmp_path / "lists/list.jsonl", [row])
    here = [paint(tmp_path / "work" / name, "red") for name in ("in.png", "truth.png")]
    found, output = read_by_all(file, Path("by-work"))
    assert list(found[:2]) == here
    assert output.resolve() == tmp_path / "work/out/0.png"  # where its input was found
    messages = [record.getMessage() for record in caplog.records]  # one per program
    text = f"{file}: paths are relative to the working directory, not to the list"
    assert messages == [text] * 3

    caplog.clear()
    beside = [paint(tmp_path / "lists" / name, "blue") for name in ("in.png", "truth.png")]
    found, output = read_by_all(file, Path("by-list"))
    assert list(found[:2]) == beside and output == tmp_path / "lists/out/0.png"
    absolute = write_list(
        tmp_path / "lists/a.jsonl", [row | {"input": str(tmp_path / "work/in.png")}]
    )
    assert edits_of_jsonl(absolute) == [
        ListedEdit(
            tmp_path / "work/in.png",
            "x",
            tmp_path / "lists/out/0.png",
            truth=tmp_path / "lists/truth.png",
        )
    ]
    assert not caplog.records


def test_a_deeply_nested_line_is_not_json(tmp_path):
    (tmp_path / "list.jsonl").write_text("[" * 100_000)
    ((line, problem),) = read_objects("--pairs", tmp_path / "list.jsonl")
    assert line == 1 and problem.startswith("not JSON (maximum recursion depth exceeded")


@pytest.mark.variants
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "gone.png"}, "gone.png does not exist"),
        ({"edit": " "}, "edit is empty"),
    ],
)
def test_every_program_refuses_a_row_alike(tmp_path, capsys, change, message):
    row = {"input": "in.png", "edit": "x", "edited": "truth.png", "output": "out.png"}
    for name in ("in.png", "truth.png"):
        paint(tmp_path / "lists" / name, "red")
    file = write_list(tmp_path / "lists/list.jsonl", [row, row | {"edit": "y"} | change])
    errors = []
    for main, *args in (
        (parquet_processing.main, "--pairs", str(file), "--output_dir", "data"),
        (edit_cli.main, "--model", "none", "--edits_jsonl", str(file)),
    ):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 2
        errors.append(capsys.readouterr().err.removeprefix("error: ").strip())
    with pytest.raises(ValueError) as error:
        held_out.pairs_of_jsonl(file)
    errors.append(str(error.value))
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"{file} has 1 problem: line 2: ") and message in errors[0]


def test_the_documented_keys_are_the_accepted_ones():
    text = (ROOT / "docs" / "data.md").read_text().partition("## Lists of edits")[2]
    rows = re.findall(r"^\| .*? \| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    assert [set(re.findall(r"\w+", row)) for row in rows] == [set(x) for x in NAMES.values()]
