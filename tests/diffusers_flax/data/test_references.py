"""The column reference_image: crops with its pair, rows and sets without one, lists."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from shards import open_mixture, open_pairs, plain, random_png, write_list, write_random_shard

import parquet_processing

REFERENCE = dict(reference_image="reference_image")


def write_references(folder, count=24):
    """Pairs whose reference is their edited image, null in every third row, grey in every fourth.

    Grey references have another aspect ratio.
    """
    rows = []
    for n in range(count):
        size = (40, 24) if n % 2 else (24, 24)
        edited = random_png([n, 1], size)
        reference = None if n % 3 == 0 else plain(90, (10, 30)) if n % 4 == 0 else edited
        cells = dict(original_image=random_png([n, 0], size), edited_image=edited)
        rows.append(cells | dict(edit_prompt=str(n), reference_image=reference))
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return folder


def check(batch):
    """The references of a batch are what write_references says."""
    assert batch["has_reference"].dtype == bool
    for n, has_reference, reference, edited in zip(
        map(int, batch["edit_prompt"]),
        *(batch[name] for name in ("has_reference", "reference_image", "edited_pixel_values")),
    ):
        assert has_reference == (n % 3 != 0)
        expected = 0 if n % 3 == 0 else 90 if n % 4 == 0 else edited
        np.testing.assert_array_equal(reference, np.broadcast_to(expected, reference.shape))


def test_references_are_cropped_and_flipped_with_their_pairs(tmp_path):
    folder = write_references(tmp_path / "data")
    options = dict(batch_size=8, resolution=16)
    dataset = open_pairs(folder, **options, **REFERENCE)
    for batch in itertools.chain(dataset, dataset):
        assert batch["reference_image"].shape == (8, 16, 16, 3)
        check(batch)
    shapes = set()
    for batch in open_pairs(folder, **options, **REFERENCE, sizes=((24, 16), (16, 16))):
        shapes.add(batch["reference_image"].shape)
        check(batch)
    assert shapes == {(8, 16, 24, 3), (8, 16, 16, 3)}
    state, without = dataset.state_dict(), open_pairs(folder, **options)
    assert not {"reference_image", "has_reference"} & next(iter(without)).keys()
    with pytest.raises(ValueError, match=r"columns was .*, reference_image"):
        without.load_state_dict(state)
    batches = list(without)
    for batch, other in zip(batches, open_pairs(folder, **options, **REFERENCE)):
        for name, array in batch.items():  # the same pairs as without references
            np.testing.assert_array_equal(array, other[name])


def test_a_set_without_references_has_zeros(tmp_path):
    write_random_shard(tmp_path / "a.parquet", 24)
    folders = [write_references(tmp_path / "data"), tmp_path]
    found = set()
    for batch in itertools.islice(
        open_mixture(folders, (1, 1), batch_size=8, resolution=16, **REFERENCE), 6
    ):
        for has_reference, reference in zip(batch["has_reference"], batch["reference_image"]):
            found.add(bool(has_reference))
            assert has_reference == reference.any()
    assert found == {False, True}
    with pytest.raises(ValueError, match=r"no column reference_image; .* --reference_image_column"):
        open_pairs(tmp_path, batch_size=8, **REFERENCE)


def test_a_damaged_reference_is_a_damaged_pair(tmp_path, capsys):
    file = write_references(tmp_path / "data") / "a.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[5]["reference_image"] = b"bad"
    pq.write_table(pa.Table.from_pylist(rows), file)
    dataset = open_pairs(file.parent, batch_size=8, resolution=16, max_bad_fraction=1, **REFERENCE)
    list(dataset)
    assert [*dataset.bad_rows] == [("a.parquet", 5)]
    parquet_processing.main(["--train_data_dir", str(file.parent), "--preview="])
    out = capsys.readouterr().out
    assert "<- reference image" in out and "row 5: reference_image: no known image" in out


def test_a_list_with_references(tmp_path, capsys):
    """They go into the shards, and with held-out pairs into a list."""
    rows = []
    for n in range(4):
        for name in ("a", "b", "c"):
            image = Image.fromarray(np.full((16, 16 if name < "c" else 30, 3), 40 * n, np.uint8))
            image.save(tmp_path / f"{name}{n}.png")
        rows.append({"input": f"a{n}.png", "edit": str(n), "edited": f"b{n}.png"})
        if n:
            rows[-1]["reference"] = f"c{n}.png"
    listed = write_list(tmp_path / "pairs.jsonl", rows)
    flags = ["--pairs", str(listed), "--output_dir", str(tmp_path / "out"), "--preview="]
    held_out = tmp_path / "held"
    flags += ["--num_held_out=2", "--held_out_dir", str(held_out)]
    parquet_processing.main(flags)
    assert "<- reference image" in capsys.readouterr().out
    cells = pq.read_table(tmp_path / "out").to_pylist()
    cells = {cell["edit_prompt"]: cell["reference_image"] for cell in cells}
    written = {cell: data and data["bytes"] for cell, data in cells.items()}
    for line in map(json.loads, (held_out / "edits.jsonl").read_text().splitlines()):
        name = line.get("reference")
        written[line["edit"]] = name and (held_out / name).read_bytes()
    assert written.pop("0") is None
    assert written == {str(n): (tmp_path / f"c{n}.png").read_bytes() for n in (1, 2, 3)}
    clean = ["--pairs", str(tmp_path / "out"), "--output_dir", str(tmp_path / "clean")]
    parquet_processing.main([*clean, "--drop", "unreadable", "--preview="])
    assert pq.read_table(tmp_path / "clean").column_names[-1] == "reference_image"
