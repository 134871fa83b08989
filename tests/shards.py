"""Shards and lists of edit pairs, and loaders that read them."""

import csv
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from helpers import PROMPTS
from PIL import Image

from diffusers_flax.data.dataset import ParquetImagePairs
from diffusers_flax.data.mixture import Mixture
from diffusers_flax.data.options import Columns, Processes, Reading, Transform

COLUMNS = ("original_image", "edit_prompt", "edited_image")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
ORIGINAL, EDITED = "original_pixel_values", "edited_pixel_values"


def encode(pixels, image_format="PNG", **options):
    """The bytes of an image file; pixels: an array or an Image."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def smooth(seed, height=24, width=24):
    """An image with smooth gradients, uint8 (height, width, 3)."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    large = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(large)


def plain(value, shape=(20, 20)):
    """A PNG of one grey that identifies its row; shape: (height, width)."""
    return encode(np.full((*shape, 3), value, np.uint8))


def random_png(seed, size=(22, 18)):
    """A PNG of random pixels; size: (width, height)."""
    return encode(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8))


def write_shard(path, rows, names=COLUMNS, **options):
    """Write rows of (original bytes, prompt, edited bytes) as public datasets store them."""
    originals, prompts, edits = zip(*rows) if rows else ((), (), ())
    cells = [
        pa.array([{"bytes": data, "path": None} for data in originals], IMAGE),
        pa.array(prompts, pa.string()),
        pa.array([{"bytes": data, "path": None} for data in edits], IMAGE),
    ]
    pq.write_table(pa.table(dict(zip(names, cells))), path, **options)


def write_random_shard(path, num_rows, seed=0, broken=(), names=COLUMNS, sizes=((22, 18),)):
    """Write a shard of random images.

    Args:
        path: file.
        num_rows: rows; row i has the prompt i % 3 of PROMPTS.
        seed: of the images.
        broken: rows whose original image is damaged.
        names: of the columns.
        sizes: (width, height) of the images of row i are sizes[i % len(sizes)].
    """
    rows = [
        (
            b"no image" if i in broken else random_png([seed, i, 0], sizes[i % len(sizes)]),
            PROMPTS[i % 3],
            random_png([seed, i, 1], sizes[i % len(sizes)]),
        )
        for i in range(num_rows)
    ]
    write_shard(path, rows, names)


def write_references(folder, count=24):
    """Write pairs whose reference is their edited image, grey of another shape, or null.

    Their prompts say which: edited, grey or none.
    """
    rows, kinds = [], ("none", "edited", "edited", "none", "grey", "edited")
    for n in range(count):
        size = (40, 24) if n % 2 else (24, 24)
        cells = dict(original_image=random_png([n, 0], size), edited_image=random_png([n, 1], size))
        references = {"edited": cells["edited_image"], "grey": plain(90, (10, 30)), "none": None}
        kind = kinds[n % 6]
        rows.append(cells | {"edit_prompt": kind, "reference_image": references[kind]})
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return folder


def write_list(file, rows):
    """Write dicts with equal keys as JSON lines or CSV; returns the file."""
    if file.suffix == ".csv":
        with open(file, "w", encoding="utf-8-sig", newline="") as opened:
            writer = csv.DictWriter(opened, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def write_numbered(folder, shard_rows, row_group_size=8, first=0, names=COLUMNS):
    """Write shards whose rows have prompts str(n), from first on, and colours n and 255 - n."""
    for k, count in enumerate(shard_rows):
        rows = [(plain(n % 256), str(n), plain(255 - n % 256)) for n in range(first, first + count)]
        write_shard(folder / f"shard-{k}.parquet", rows, names, row_group_size=row_group_size)
        first += count
    return folder


def divide_shards(folder, shard_rows, process_count):
    """Link the shards of write_numbered for each process: (directories, rows of each)."""
    folders, rows_of = [folder / f"own-{k}" for k in range(process_count)], [0] * process_count
    for own in folders:
        own.mkdir()
    for k, rows in enumerate(shard_rows):
        name = f"shard-{k}.parquet"
        (folders[k % process_count] / name).symlink_to(folder / name)
        rows_of[k % process_count] += rows
    return folders, rows_of


def grouped(**options):
    """Arguments of ParquetImagePairs and Mixture, of which options has the fields."""
    groups = dict(columns=Columns, transform=Transform, processes=Processes, reading=Reading)
    for name, group in groups.items():
        names = [field.name for field in fields(group) if field.name in options]
        if names:
            options[name] = group(**{field: options.pop(field) for field in names})
    return options


def open_pairs(folder, **options):
    """ParquetImagePairs with options by the names of their fields."""
    return ParquetImagePairs(folder, **grouped(**options))


def open_mixture(folders, weights=(), **options):
    """Mixture likewise."""
    return Mixture(folders, weights, **grouped(**options))


def on_processes(make, process_count):
    """Call make(process_index, all_gather) in one thread per process; return results or errors."""
    barrier = threading.Barrier(process_count)
    told = [None] * process_count

    def run(process_index):
        def all_gather(array):
            told[process_index] = np.asarray(array)
            barrier.wait(10)
            everything = np.stack(told)
            barrier.wait(10)
            return everything

        try:
            return make(process_index, all_gather)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(process_count) as pool:
        return list(pool.map(run, range(process_count)))


def same(batch, other):
    return (
        batch["edit_prompt"] == other["edit_prompt"]
        and np.array_equal(batch[ORIGINAL], other[ORIGINAL])
        and np.array_equal(batch[EDITED], other[EDITED])
    )


def prompts_of(batches):
    return [prompt for batch in batches for prompt in batch["edit_prompt"]]


class ListedEdit(NamedTuple):
    input: Path
    instruction: str
    output: Path
    mask: Path | None = None
    reference: Path | None = None
    after: int | None = None
    truth: Path | None = None


def edits_of_jsonl(file):
    """The edits of a list, as edit_cli.py reads them."""
    from diffusers_flax.generating.requests import read_edits

    return [ListedEdit(*edit.values()) for edit in read_edits(file)]
