"""Public datasets: columns found without flags, lists of instructions, images beside the shard."""

from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from known_sets import IMAGE, SCHEMAS, plain, write_known
from shards import open_pairs

import parquet_processing
from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import (
    find_columns,
    list_row_groups,
    pair_at,
    read_row_group,
)
from diffusers_flax.evaluation.held_out import pairs_of_shards

ORIGINAL, EDITED = "original_pixel_values", "edited_pixel_values"
OPTIONS = {"batch_size": 4, "resolution": 8, "random_crop": False}


def write_table(folder, rows, schema=None):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "a.parquet")
    return folder


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_known_set_needs_no_flags(tmp_path, capsys, name):
    folder = write_known(tmp_path / "data", name)
    for batch in open_pairs(folder, **OPTIONS):
        for original, edited, prompt in zip(batch[ORIGINAL], batch[EDITED], batch["edit_prompt"]):
            n = int(prompt.partition(".")[0])
            assert (original == n).all() and (edited == 255 - n).all()
    pairs = pairs_of_shards(folder, Columns())
    assert [pair.instruction.partition(".")[0] for pair in pairs] == list("01234567")
    preview = tmp_path / "preview.png"
    parquet_processing.main(["--train_data_dir", str(folder), "--preview", str(preview)])
    out = capsys.readouterr().out
    columns = SCHEMAS[name][1]
    assert f"pairs       {columns[0]} to {columns[1]} by {columns[2]}, as in {name}\n" in out
    assert f"{columns[0]}: struct<bytes: binary, path: string>  <- original image" in out
    has_masks = name.endswith(("MagicBrush", "UltraEdit", "HumanEdit"))
    assert ("  <- mask, read for" in out) == has_masks
    assert preview.exists() and "unreadable  0 of 8 rows" in out
    assert ("list<element: string>  <- prompt" in out) == ("OmniEdit" in name)


def columns_of(*names):
    schema = pa.schema([(n, pa.string() if "prompt" in n else pa.binary()) for n in names])
    return find_columns(schema, "a.parquet", Columns())


def test_whole_sets_are_matched(tmp_path):
    """A column that two sets share does not decide; flags do."""
    folder = write_known(tmp_path / "hq", "UCSC-VLAA/HQ-Edit")
    inverse = ("output_image", "input_image", "inverse_edit")
    for given in (inverse, ("", "", "inverse_edit")):
        (group,) = list_row_groups(folder, Columns(*given))
        assert group.columns == inverse
        assert pair_at(read_row_group(group), 3)[:3] == (plain(252), plain(3), "inverse_edit 3")
    (group,) = list_row_groups(folder, Columns(edit_prompt="output"))
    assert group.columns == ("input_image", "output_image", "output")
    names = ("original_image", "input_image", "edited_image", "edit_prompt", "output_image")
    assert columns_of(*names) == ("original_image", "edited_image", "edit_prompt")
    with pytest.raises(ValueError, match=r"it has source_img.*--edited_image_column$"):
        columns_of("source_img", "edited_img", "instruction")


LISTS = (
    pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.string(), 3),
    pa.list_(pa.dictionary(pa.int32(), pa.string())),
)  # fmt: skip


def write_lists(folder, texts, kind=LISTS[0], row_group_size=8):
    rows = [
        {"original_image": plain(n), "edited_image": plain(n), "edit_prompt": each}
        for n, each in enumerate(texts)
    ]
    schema = pa.schema(
        [("original_image", pa.binary()), ("edited_image", pa.binary()), ("edit_prompt", kind)]
    )
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, folder / "a.parquet", row_group_size=row_group_size)
    return folder


def drawn(folder, epochs=3, **options):
    """{row: its instruction} of each epoch; images show the row."""
    datasets = [
        open_pairs(folder, **OPTIONS | options | {"process_index": k})
        for k in range(options.get("process_count", 1))
    ]
    return [
        {
            int(image[0, 0, 0]): text
            for dataset in datasets
            for batch in dataset
            for image, text in zip(batch[ORIGINAL], batch["edit_prompt"])
        }
        for _ in range(epochs)
    ]


def test_an_instruction_is_drawn_for_each_epoch(tmp_path):
    """By seed, epoch and row: not by threads, processes, batches or the place in the epoch."""
    folder = write_lists(tmp_path / "a", [[f"{n}.{k}" for k in range(3)] for n in range(48)])
    first = drawn(folder)
    assert all(text.startswith(f"{n}.") for epoch in first for n, text in epoch.items())
    assert [len(epoch) for epoch in first] == [48] * 3 and first[0] != first[1] != first[2]
    for options in (
        {"num_threads": 1}, {"process_count": 2}, {"batch_size": 12}, {"shuffle_buffer": 0},
    ):  # fmt: skip
        assert drawn(folder, **options) == first
    assert drawn(folder, seed=1) != first
    shares = Counter(text[-1] for epoch in drawn(folder, epochs=12) for text in epoch.values())
    # Four standard deviations of 576 draws with probability 1/3 are 45.
    assert all(abs(shares[k] - 192) < 45 for k in "012")


@pytest.mark.parametrize("kind", LISTS[1:], ids=str)
def test_every_type_of_list(tmp_path, kind):
    folder = write_lists(tmp_path / "a", [[f"{n}.{k}" for k in range(3)] for n in range(8)], kind)
    stored = pq.read_schema(folder / "a.parquet").field("edit_prompt").type
    assert type(stored) is type(kind)
    (epoch,) = drawn(folder, epochs=1)
    assert all(text in {f"{n}.{k}" for k in range(3)} for n, text in epoch.items())


def test_a_list_without_instruction_is_a_bad_row(tmp_path):
    texts = [["a", "b"], [], None, ["a", None], ["c"], [""], ["d"], ["e"]]
    folder = write_lists(tmp_path / "a", texts)
    dataset = open_pairs(folder, **OPTIONS, max_bad_fraction=0.5)
    seen = [text for batch in dataset for text in batch["edit_prompt"]]
    assert {row for _, row in dataset.bad_rows} == {1, 2, 3} and len(seen) == 8
    assert set(dataset.bad_rows.values()) == {"edit_prompt: null"}
    assert set(seen) >= {"c", "", "d", "e"}
    assert [pair.index for pair in pairs_of_shards(folder, Columns())] == [0, 4, 5, 6, 7]


def test_images_beside_the_shard(tmp_path):
    """Of text columns, of structs without bytes, and of some rows of a struct with bytes."""
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (folder / "images").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "linked").symlink_to(elsewhere)
    for n in range(4):
        (folder / f"images/{n}.png").write_bytes(plain(n))
        (elsewhere / f"{n}.png").write_bytes(plain(100 + n))
    paths = ["images/0.png", str(folder / "images/1.png"), "./images/../images/2.png"]
    paths += ["linked/3.png"]
    structs = [{"bytes": None if n % 2 else plain(50 + n), "path": paths[n]} for n in range(4)]
    columns = {
        "original_image": pa.array(paths, pa.large_string()),
        "edited_image": pa.array(structs, IMAGE),
        "edit_prompt": list("0123"),
        "only": pa.array([{"path": path} for path in paths]),
        "untyped": pa.array([{"bytes": None, "path": path} for path in paths]),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet")
    wanted = {0: 0, 1: 1, 2: 2, 3: 103}
    for column in ("", "only", "untyped"):
        (batch,) = open_pairs(folder, **OPTIONS, original_image=column)
        for prompt, original, edited in zip(batch["edit_prompt"], batch[ORIGINAL], batch[EDITED]):
            n = int(prompt)
            assert (original == wanted[n]).all()
            assert (edited == (wanted[n] if n % 2 else 50 + n)).all()
    pairs = pairs_of_shards(folder, Columns("only"))
    assert pairs[3].original == plain(103)


def test_files_outside_of_the_directory_are_not_read(tmp_path):
    """A shard may come from anyone."""
    folder = tmp_path / "data"
    secret = tmp_path / "data.png"
    secret.write_bytes(plain(1))
    folder.mkdir()
    (folder / "a.png").write_bytes(plain(2))
    paths = [str(secret), "../data.png", "gone.png", None, "a.png"]
    rows = [
        {"original_image": path, "edited_image": plain(2), "edit_prompt": "x"} for path in paths
    ]
    write_table(folder, rows)
    dataset = open_pairs(folder, **OPTIONS | {"batch_size": 5}, max_bad_fraction=1)
    (batch,) = dataset
    assert (batch[ORIGINAL] == 2).all()
    reasons = [dataset.bad_rows["a.parquet", n] for n in range(4)]
    assert all(f"{paths[n]} is outside of {folder}; link" in reasons[n] for n in range(2))
    assert reasons[2] == f"{folder}/gone.png: No such file or directory"
    assert reasons[3] == "original_image: no image bytes in the shard"
