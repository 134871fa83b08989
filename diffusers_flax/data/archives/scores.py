"""Choose pairs by their scores: rows of shards by make_pairs.py, copied to new shards.

    report = copy_best(Path("data"), Path("clean"), Wanted(min_clip_image=0.75, num_kept=4))

Scores are read first, images only of row groups with a row that is kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from diffusers_flax.data.archives.index import one_line_errors
from diffusers_flax.data.mixture import first_metadata
from diffusers_flax.data.pairs import (
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    SHARD_BYTES,
    SHARDS,
    check_directory,
    move_when_complete,
)
from diffusers_flax.data.shards import READ_BYTES, is_text, open_local_shards
from diffusers_flax.loading.files import naming_full_disk
from diffusers_flax.messages import first_names

SCORES = {  # columns of each threshold; the least of them counts
    "min_clip_text": ("clip_text_original", "clip_text_edited"),
    "min_clip_image": ("clip_image",),
    "min_clip_direction": ("clip_direction",),
}
COLUMNS = [column for columns in SCORES.values() for column in columns]
TEXTS = ("original_prompt", "edit_prompt", "edited_prompt")
BATCH_ROWS = 8  # rows of images that are read at a time


class Wanted(NamedTuple):
    """Which pairs are kept. The names are flags."""

    min_clip_text: float | None = None  # of both images with their captions; None: any
    min_clip_image: float | None = None  # of both images
    min_clip_direction: float | None = None  # of the change of images and of captions
    num_kept: int | None = None  # of the same captions, with the largest direction; None: all

    def check(self) -> None:
        """Raise a ValueError for values out of range."""
        for name in SCORES:
            least = getattr(self, name)
            if least is not None and not -1 <= least <= 1:
                raise ValueError(f"--{name} {least} must be from -1 to 1, as cosines are")
        if self.num_kept is not None and self.num_kept < 1:
            raise ValueError(f"--num_kept {self.num_kept} must be at least 1")


def copy_best(
    source: Path,
    output_dir: Path,
    wanted: Wanted,
    *,
    max_pairs: int | None = None,
    overwrite: bool = False,
) -> str:
    """Copy rows of shards whose scores are good enough; columns and cells stay as they are.

    Args:
        source: directory of shards with columns of scores.
        output_dir: directory for the new shards, empty or new unless overwrite.
        wanted: see Wanted.
        max_pairs: only choose from the first N rows; None: all.
        overwrite: replace earlier shards.

    Returns:
        A summary of a few lines.

    Raises:
        ValueError: shards are missing, damaged or without scores; no row is good enough;
            output_dir is not empty. Nothing is written in these cases.
    """
    if output_dir.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"--output_dir {output_dir} is also --pairs, or in it; name another")
    check_directory("output_dir", output_dir, overwrite)
    shards = open_local_shards(source, "--pairs")
    check_columns(source, shards)
    files = [path for path, _ in shards]
    scores = read_scores(files)[:max_pairs]
    captions = number_captions(files)[:max_pairs] if wanted.num_kept else None
    good, counts = find_good(scores, wanted)
    kept = best_of_captions(good, scores, captions, wanted.num_kept) if wanted.num_kept else good
    with move_when_complete(output_dir, (SHARDS,)) as folder:
        num_shards = copy_rows(shards, kept, folder)
    lines = [f"wrote {len(kept)} of {len(scores)} pairs to {output_dir} (shards: {num_shards})"]
    lines += [f"            {count} reach {flag}" for flag, count in counts.items()]
    if len(counts) > 1:
        lines.append(f"            {len(good)} reach all")
    if wanted.num_kept:
        number = len(np.unique(captions[good]))
        lines.append(
            f"            {len(kept)} of them with --num_kept {wanted.num_kept}, from {number} "
            f"of {len(np.unique(captions))} lines of captions"
        )
    return "\n".join(lines)


def has_scores(folder: Path) -> bool:
    """Whether the first shard of a directory has columns of scores; False if it has no shards."""
    shard = first_metadata(str(folder)) if folder.is_dir() else None
    return shard is not None and not missing_columns(shard.schema.to_arrow_schema())


def check_columns(source: Path, shards: list[tuple[Path, pq.FileMetaData]]) -> None:
    """Raise a ValueError for shards without scores, or with different columns."""
    schemas = {path.name: metadata.schema.to_arrow_schema() for path, metadata in shards}
    without = [name for name, schema in schemas.items() if missing_columns(schema)]
    if without:
        missing = ", ".join(missing_columns(schemas[without[0]]))
        raise ValueError(
            f"{len(without)} of {len(shards)} shards in --pairs {source} have no scores: "
            f"{first_names(without)} (no column {missing}); name a directory of make_pairs.py"
        )
    first, schema = next(iter(schemas.items()))
    if other := [name for name in schemas if not schemas[name].equals(schema)]:
        raise ValueError(
            f"--pairs {source}: {first_names(other)} and {first} have different columns; name a "
            "directory of shards of one kind"
        )


def missing_columns(schema: pa.Schema) -> list[str]:
    """Names of columns that a shard does not have, or not as text and numbers."""
    kinds = dict(zip(schema.names, schema.types))
    texts = [name for name in TEXTS if not is_text(kinds.get(name))]
    none = pa.null()
    return texts + [name for name in COLUMNS if not pa.types.is_floating(kinds.get(name, none))]


def read_scores(files: list[Path]) -> np.ndarray:
    """The scores that thresholds are for, float64 (rows of all files, len(SCORES)); NaN: null."""
    tables = []
    for file in files:
        with one_line_errors(file):
            tables.append(pq.read_table(file, columns=COLUMNS))
    columns = pa.concat_tables(tables)
    values = {name: columns[name].to_numpy().astype(np.float64) for name in COLUMNS}
    least = [np.min([values[name] for name in names], axis=0) for names in SCORES.values()]
    return np.column_stack(least)


def number_captions(files: list[Path]) -> np.ndarray:
    """A number for each row, int64; rows with the same captions and instruction have the same."""
    numbers, rows = {}, []
    for file in files:
        with one_line_errors(file):
            table = pq.read_table(file, columns=list(TEXTS))
        texts = zip(*(table[name].to_pylist() for name in TEXTS))
        rows += [numbers.setdefault(text, len(numbers)) for text in texts]
    return np.array(rows, np.int64)


def find_good(scores: np.ndarray, wanted: Wanted) -> tuple[np.ndarray, dict[str, int]]:
    """The rows that reach all thresholds.

    Args:
        scores: of read_scores.

    Returns:
        (their numbers, {flag with its value: rows that reach it}).

    Raises:
        ValueError: no row reaches a threshold, or all of them.
    """
    good, counts = np.ones(len(scores), bool), {}
    for column, name in enumerate(SCORES):
        if (least := getattr(wanted, name)) is None:
            continue
        reached = scores[:, column] >= least  # NaN does not
        counts[f"--{name} {least}"] = int(reached.sum())
        if len(scores) and not reached.any():
            best = np.fmax.reduce(scores[:, column])
            raise ValueError(
                f"--{name} {least} leaves none of the {len(scores)} pairs; their best score is "
                f"{np.floor(best * 1e4) / 1e4:.4f}"
            )
        good &= reached
    if not good.any():
        if not len(scores):
            raise ValueError("--pairs has shards without rows; name another directory")
        each = ", ".join(f"{count} reach {flag}" for flag, count in counts.items())
        raise ValueError(
            f"none of the {len(scores)} pairs reaches all thresholds ({each}); lower one"
        )
    return np.flatnonzero(good), counts


def best_of_captions(
    good: np.ndarray, scores: np.ndarray, captions: np.ndarray, num_kept: int
) -> np.ndarray:
    """Of the good rows of the same captions the num_kept with the largest direction, in order.

    Of equal ones the first are kept.
    """
    direction = scores[good, list(SCORES).index("min_clip_direction")]
    order = good[np.lexsort((-direction, captions[good]))]  # stable; NaN last
    _, counts = np.unique(captions[order], return_counts=True)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(order[rank < num_kept])


def copy_rows(shards: list[tuple[Path, pq.FileMetaData]], kept: np.ndarray, folder: Path) -> int:
    """Write rows to shards named like train-00000-of-00003.parquet.

    Args:
        shards: to read.
        kept: numbers of rows of all shards, in order.
        folder: for the new shards.

    Returns:
        The number of new shards.
    """
    written, writer, pending, num_bytes = [], None, [], 0
    schema = shards[0][1].schema.to_arrow_schema().remove_metadata()
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}

    def write_group():
        nonlocal writer, num_bytes
        table = pa.Table.from_batches(pending, schema)
        if writer and num_bytes + table.nbytes > SHARD_BYTES:
            writer.close()
            writer = None
        if not writer:
            written.append(folder / f"{len(written):05d}.parquet")
            writer, num_bytes = pq.ParquetWriter(written[-1], schema, **options), 0
        writer.write_table(table)  # one row group
        num_bytes += table.nbytes
        pending.clear()

    with naming_full_disk(folder):
        try:
            for batch in kept_batches(shards, kept):
                group = [*pending, batch]
                is_full = sum(x.num_rows for x in group) > ROW_GROUP_ROWS
                if pending and (is_full or sum(x.nbytes for x in group) > ROW_GROUP_BYTES):
                    write_group()
                pending.append(batch)
            write_group()
        finally:
            if writer:
                writer.close()
    for number, file in enumerate(written):
        file.rename(folder / f"train-{number:05d}-of-{len(written):05d}.parquet")
    return len(written)


def kept_batches(
    shards: list[tuple[Path, pq.FileMetaData]], kept: np.ndarray
) -> Iterator[pa.RecordBatch]:
    """The rows with the numbers `kept`, a few at a time."""
    is_kept = np.zeros(sum(metadata.num_rows for _, metadata in shards), bool)
    is_kept[kept] = True
    first = 0
    with tqdm(desc="copying", total=len(kept), unit="pair", disable=None) as bar:
        for path, metadata in shards:
            with (
                one_line_errors(path),
                pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as opened,
            ):
                for index in range(metadata.num_row_groups):
                    stop = first + metadata.row_group(index).num_rows
                    batches = ()
                    if is_kept[first:stop].any():
                        batches = opened.iter_batches(BATCH_ROWS, [index], use_threads=False)
                    for batch in batches:
                        chosen = batch.filter(pa.array(is_kept[first : first + batch.num_rows]))
                        first += batch.num_rows
                        bar.update(chosen.num_rows)
                        if chosen.num_rows:
                            yield chosen.replace_schema_metadata(None)
                    first = stop
