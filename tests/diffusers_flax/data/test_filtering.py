"""parquet_processing.py --pairs with shards: rows are chosen by scores and faults, and copied."""

import json
import random
from collections import defaultdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from edit_sets import run
from helpers import files_of
from known_sets import SCHEMAS, known_rows
from shards import plain, write_numbered

import parquet_processing
from diffusers_flax.data import writing
from diffusers_flax.data.archives.filtering import filter_shards
from diffusers_flax.data.archives.flags import PairsFlags
from diffusers_flax.data.writing import SCHEMA

FLAGS = ("min_clip_text", "min_clip_image", "min_clip_direction", "num_kept")
SCORES = ("clip_text_original", "clip_text_edited", "clip_image", "clip_direction")
COLUMNS = [("line", pa.int64()), ("sample", pa.int32()), *((x, pa.float32()) for x in SCORES)]
SCORED = pa.schema([*SCHEMA, *COLUMNS], {b"make_pairs": b"{}"})


def row(number, line=1, **given):
    """A row of make_pairs.py; given: other columns."""
    images = [{"bytes": plain(x % 256), "path": None} for x in (number, 255 - number)]
    texts = [f"before {line}", f"edit {line}", f"after {line}"]
    values = [texts[0], images[0], *texts[1:], images[1], line, number, 0.3, 0.3, 0.8, 0.3]
    return dict(zip(SCORED.names, values)) | given


def write(folder, shards, schema=SCORED):
    """Write lists of rows as shards whose row groups have 5 rows."""
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(shards):
        path = folder / f"train-{number:05d}-of-{len(shards):05d}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=5)
    return folder


def random_rows(count, num_lines=4):
    """Rows with random scores, of which some are equal and some missing."""
    rng = random.Random(0)
    grid = [None, float("nan"), *(x / 8 for x in range(9))]
    return [
        row(n, rng.randrange(num_lines), **{name: rng.choice(grid) for name in SCORES})
        for n in range(count)
    ]


def chosen(rows, text, image, direction, num_kept):
    """The numbers of the rows that are kept, row by row."""

    def reaches(value, least):
        return least is None or (value is not None and value >= least)

    kept, by_line = [], defaultdict(list)
    for one in rows:
        values = [one[name] for name in SCORES]
        if all(map(reaches, values, (text, text, image, direction))):
            by_line[one["line"]].append(one)
    for good in by_line.values():
        good.sort(key=lambda x: -x["clip_direction"] if reaches(x["clip_direction"], -1) else 2)
        kept += [one["sample"] for one in good[:num_kept]]
    return sorted(kept)


@pytest.mark.parametrize(
    "wanted",
    [
        (0.25, None, None, None),
        (None, 0.5, 0.25, None),
        (0.125, 0.25, 0.375, 2),
        (None, None, None, 3),
    ],
)
def test_rows_are_chosen_as_one_by_one(tmp_path, wanted):
    rows = random_rows(120)
    source = write(tmp_path / "data", [rows[:47], [], rows[47:], [row(999)]])
    report = filter_shards(
        source, tmp_path / "clean", PairsFlags(**dict(zip(FLAGS, wanted)), max_pairs=120)
    )
    found = pq.read_table(tmp_path / "clean")
    numbers = chosen(rows, *wanted)
    assert 0 < len(numbers) < 120 and found["sample"].to_pylist() == numbers
    # Cells, columns and types are the same.
    before = pq.read_table(source)
    places = [before["sample"].to_pylist().index(number) for number in numbers]
    assert str(found.to_pylist()) == str(before.take(places).to_pylist())  # NaN equals NaN
    assert found.schema.equals(before.schema)
    assert f"wrote {len(numbers)} of 120 pairs to" in report


def test_shards_with_scores_are_not_converted_without_a_choice(tmp_path, monkeypatch, capsys):
    """Conversion of shards would leave the scores out."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data", [[row(n) for n in range(10)]])
    with pytest.raises(SystemExit, match="2"):
        parquet_processing.main(["--pairs", "data", "--output_dir", "clean"])
    assert "--pairs data has shards, which training reads" in capsys.readouterr().err
    assert not any((tmp_path / "clean").glob("*"))
    held_out = ["--num_held_out", "2", "--held_out_dir", "held_out"]
    parquet_processing.main(["--pairs", "data", "--output_dir", "clean", *held_out])
    assert (tmp_path / "held_out" / "edits.jsonl").exists()


def test_a_threshold_is_compared_in_double_precision(tmp_path):
    """As make_pairs.py does: float32 of 0.7 is below 0.7, float32 of 0.2 above 0.2."""
    source = write(tmp_path / "data", [[row(0, clip_image=0.7, clip_direction=0.2), row(1)]])
    filter_shards(source, tmp_path / "direction", PairsFlags(min_clip_direction=0.2))
    assert pq.read_table(tmp_path / "direction")["sample"].to_pylist() == [0, 1]
    filter_shards(source, tmp_path / "image", PairsFlags(min_clip_image=0.7))
    assert pq.read_table(tmp_path / "image")["sample"].to_pylist() == [1]


def test_shards_and_row_groups_are_limited(tmp_path, monkeypatch):
    rows = [row(n) for n in range(60)]
    size = sum(map(len, (rows[0]["original_image"]["bytes"], rows[0]["edited_image"]["bytes"])))
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 14 * size)
    monkeypatch.setattr(writing, "SHARD_BYTES", 40 * size)
    source = write(tmp_path / "data", [rows[:30], rows[30:]])
    filter_shards(source, tmp_path / "clean", PairsFlags(num_kept=55))
    files = sorted((tmp_path / "clean").glob("*.parquet"))
    assert [x.name for x in files] == [f"train-{n:05d}-of-00003.parquet" for n in range(3)]
    groups = [pq.read_metadata(x).row_group(n).num_rows for x in files
              for n in range(pq.read_metadata(x).num_row_groups)]  # fmt: skip
    assert max(groups) <= 10 and sum(groups) == 55
    assert pq.read_table(tmp_path / "clean")["sample"].to_pylist() == list(range(55))


@pytest.mark.parametrize("name", ["Bin1117/AnyEdit", "BryanW/HumanEdit", "osunlp/MagicBrush"])
def test_rows_of_known_sets_are_copied_with_all_columns(tmp_path, name):
    """Without pairs that are damaged, repeated or held out."""
    rows, prompt = known_rows(name, 9), SCHEMAS[name][1][2]
    rows += [rows[2], rows[3] | {SCHEMAS[name][1][0]: {"bytes": b"no image", "path": None}}]
    table = pa.Table.from_pylist(rows, pa.schema(SCHEMAS[name][0]))
    texts = [b"\xff" if n == 5 else row[prompt].encode() for n, row in enumerate(rows)]
    place, column = table.schema.get_field_index(prompt), pa.array(texts).view(pa.string())
    (tmp_path / "set").mkdir()
    table = table.set_column(place, prompt, column)
    pq.write_table(table, tmp_path / "set" / "a.parquet", row_group_size=4)
    flags = ["--drop", "duplicate", "--num_held_out", "2", "--held_out_dir"]
    run(tmp_path / "set", tmp_path / "clean", *flags, str(tmp_path / "held"))
    (file,) = (tmp_path / "clean").glob("*.parquet")
    lines = (tmp_path / "held" / "edits.jsonl").read_text().splitlines()
    held = {json.loads(line)["edit"] for line in lines}
    kept = [n for n in range(9) if n != 5 and str(n) not in held]
    assert len(held) == 2 and len(kept) == 6
    assert pq.read_table(file).equals(table.take(kept))
    masks = [json.loads(line).get("mask") for line in lines]
    assert all(masks) == (name != "Bin1117/AnyEdit")


def other_columns(folder):
    write_numbered(folder, [3])


def damaged(folder):
    (file,) = folder.glob("*.parquet")
    data = bytearray(file.read_bytes())
    data[4:40] = bytes(36)  # the header of the first page
    file.write_bytes(data)


@pytest.mark.variants
@pytest.mark.parametrize(
    "flags, damage, words",
    [
        (["--min_clip_image", "0.85"], None,
         "no pair is left (0 reach --min_clip_image 0.85 (best 0.8400))"),
        (["--min_clip_image", "0.5"], other_columns, "have different columns"),
        (["--min_clip_image", "0.5"], damaged, "train-00000-of-00001.parquet cannot be read ("),
        (["--min_clip_image", "1.5"], None, "--min_clip_image 1.5 must be from -1 to 1"),
        (["--num_kept", "1", "--output_dir", "data"], None, "--output_dir data is also --pairs"),
        (["--num_kept", "1", "--pairs", "none"], None, "--pairs none is not a directory"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, flags, damage, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data", [[row(n, clip_image=0.8 + n / 100) for n in range(5)]])
    if damage:
        damage(tmp_path / "data")
    before = files_of(tmp_path)
    with pytest.raises(SystemExit) as stop:
        parquet_processing.main(["--pairs", "data", "--output_dir", "clean", *flags])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1
    assert files_of(tmp_path) == before
