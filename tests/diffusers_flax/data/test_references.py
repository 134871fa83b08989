"""The column reference_image: crops with its pair, rows and sets without one, lists."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from shards import open_mixture, open_pairs, write_list, write_random_shard, write_references

import parquet_processing

OPTIONS = dict(batch_size=8, resolution=16, reference_image="reference_image")


def test_references_are_cropped_and_flipped_with_their_pairs(tmp_path):
    folder, shapes = write_references(tmp_path / "data"), set()
    for sizes in (None, ((24, 16), (16, 16))):
        dataset = open_pairs(folder, **OPTIONS, sizes=sizes)
        for batch in itertools.chain(dataset, dataset):
            shapes.add(batch["reference_image"].shape)
            for i, kind in enumerate(batch["edit_prompt"]):
                expected = {"none": 0, "grey": 90, "edited": batch["edited_pixel_values"][i]}[kind]
                assert batch["has_reference"][i] == (kind != "none")
                assert (batch["reference_image"][i] == expected).all()
    assert shapes == {(8, 16, 24, 3), (8, 16, 16, 3)}


def test_a_set_without_references_has_zeros(tmp_path):
    write_random_shard(tmp_path / "a.parquet", 24)
    mixture = open_mixture([write_references(tmp_path / "data"), tmp_path], (1, 1), **OPTIONS)
    found = set()
    for batch in itertools.islice(mixture, 6):
        has_reference = batch["reference_image"].any((1, 2, 3))
        np.testing.assert_array_equal(batch["has_reference"], has_reference)
        found |= set(has_reference.tolist())
    assert found == {False, True}
    with pytest.raises(ValueError, match=r"no column reference_image; .*--reference_image_column"):
        open_pairs(tmp_path, **OPTIONS)


def test_a_damaged_reference_is_a_damaged_pair(tmp_path, capsys):
    file = write_references(tmp_path / "data") / "a.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[5]["reference_image"] = b"bad"
    pq.write_table(pa.Table.from_pylist(rows), file)
    parquet_processing.main(["--train_data_dir", str(file.parent), "--preview="])
    out = capsys.readouterr().out
    assert "<- reference image" in out and "reference_image: 15 of 24 rows" in out
    assert "row 5: reference_image: no known image" in out


def test_a_list_with_references(tmp_path):
    """They go into the shards, and with held-out pairs into a list."""
    rows, expected = [], {"0": None}
    for n in range(4):
        for name, width in (("a", 16), ("b", 16), ("c", 30)):
            Image.new("RGB", (width, 16), (40 * n, 0, 0)).save(tmp_path / f"{name}{n}.png")
        rows.append({"input": f"a{n}.png", "edit": str(n), "edited": f"b{n}.png"})
        if n:
            rows[-1]["reference"] = f"c{n}.png"
            expected[str(n)] = (tmp_path / f"c{n}.png").read_bytes()
    listed, held_out = write_list(tmp_path / "pairs.jsonl", rows), tmp_path / "held"
    flags = ["--pairs", listed, "--output_dir", tmp_path / "out", "--preview="]
    flags += ["--num_held_out=2", "--held_out_dir", held_out]
    parquet_processing.main([*map(str, flags)])
    written = {}
    for row in pq.read_table(tmp_path / "out").to_pylist():
        written[row["edit_prompt"]] = row["reference_image"] and row["reference_image"]["bytes"]
    for line in map(json.loads, (held_out / "edits.jsonl").read_text().splitlines()):
        name = line.get("reference")
        written[line["edit"]] = name and (held_out / name).read_bytes()
    assert written == expected
