"""Choose rows of shards by scores of make_pairs.py, by faults, or to hold them out, and copy them.

    report = filter_shards(Path("data"), Path("clean"), PairsFlags(num_kept=4))

Columns and cells stay as they are.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from diffusers_flax.data.archives.flags import PairsFlags
from diffusers_flax.data.archives.index import one_line_errors
from diffusers_flax.data.archives.tar import NAME
from diffusers_flax.data.faults import FaultFinder, Measured, measure
from diffusers_flax.data.mixture import first_metadata
from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import (
    REFERENCE,
    Cells,
    Pair,
    RowGroup,
    choose_instruction,
    find_mask_column,
    has_bytes,
    list_row_groups,
    open_local_shards,
    pair_at,
    read_row_group,
)
from diffusers_flax.data.writing import check_directories, choose_held_out, image_suffix, write_set

SCORES = {  # columns of each threshold; the least of them counts
    "min_clip_text": ("clip_text_original", "clip_text_edited"),
    "min_clip_image": ("clip_image",),
    "min_clip_direction": ("clip_direction",),
}
CAPTIONS = ["original_prompt", "edited_prompt"]
TEXTS = [*CAPTIONS, "edit_prompt"]
BATCH_ROWS = 8  # of a shard that are converted at a time
ROWS_AHEAD = 64  # that threads work on


def filter_shards(source: Path, output_dir: Path, choice: PairsFlags) -> str:
    """Copy rows of shards.

    Args:
        source: directory of shards.
        output_dir: directory for the new shards, empty or new unless overwrite.
        choice: which rows.

    Returns:
        A summary of a few lines.

    Raises:
        ValueError: shards are missing, damaged, of different columns or without scores; no row is
            left; a directory is not empty. Nothing is written in these cases.
    """
    for flag in ("output_dir", "held_out_dir"):
        folder = getattr(choice, flag)
        if folder and Path(folder).resolve().is_relative_to(source.resolve()):
            raise ValueError(f"--{flag} {folder} is also --pairs, or in it; name another")
    check_directories(output_dir, choice)
    shards = open_local_shards(source, "--pairs")
    schemas = [metadata.schema.to_arrow_schema() for _, metadata in shards]
    for (path, _), schema in zip(shards, schemas):
        if not schema.equals(schemas[0]):
            raise ValueError(
                f"--pairs {source}: {path.name} and {shards[0][0].name} have different columns; "
                "name a directory of shards of one kind"
            )
    num_rows = sum(metadata.num_rows for _, metadata in shards)
    kept, lines = np.arange(num_rows)[: choice.max_pairs], []
    num_rows = len(kept)
    if any(getattr(choice, name) is not None for name in (*SCORES, "num_kept")):
        if missing := {*TEXTS, *sum(SCORES.values(), ())} - {*schemas[0].names}:
            raise ValueError(
                f"--pairs {source} has no scores (no column {', '.join(sorted(missing))}); name a "
                "directory of make_pairs.py"
            )
        kept, lines = find_good([path for path, _ in shards], choice)
    groups, held_out = [], kept[:0]
    if choice.drop or choice.num_held_out:
        mask = find_mask_column(schemas[0], source, missing_ok=True) or None
        reference = REFERENCE if REFERENCE in schemas[0].names else None
        columns = Columns(mask=mask, reference_image=reference)
        groups = list_row_groups(str(source), columns, "--pairs")
        kept, held_out, more = find_faultless(groups, kept, choice)
        lines += more
    if not len(kept):
        raise ValueError(f"--pairs {source}: no pair is left ({', '.join(lines)})")
    rows, schema = rows_of(shards, kept), schemas[0].remove_metadata()
    held_out = images_and_texts(groups, held_out)
    number, more = write_set(rows, schema, held_out, output_dir, choice)
    head = f"wrote {len(kept)} of {num_rows} pairs to {output_dir} (shards: {number})"
    return "\n            ".join([head, *lines, *more])


def are_shards(folder: Path) -> bool:
    """Whether a directory has shards with images, and no archives."""
    shard = first_metadata(str(folder)) if folder.is_dir() else None
    has_archives = shard and any(NAME.fullmatch(file.name) for file in folder.iterdir())
    return bool(shard) and not has_archives and has_bytes(shard.schema.to_arrow_schema())


def read_columns(files: list[Path], names: list[str] | None = None) -> pa.Table:
    """Columns of all shards; names None: all columns."""
    tables = []
    for file in files:
        with one_line_errors(file), pq.ParquetFile(file) as opened:
            tables.append(opened.read(names))
    return pa.concat_tables(tables)


def rows_of(
    shards: list[tuple[Path, pq.FileMetaData]], kept: np.ndarray
) -> Iterator[tuple[dict, int]]:
    """Rows of shards with their sizes; kept: numbers of rows of all shards, in order."""
    is_kept, first = np.zeros(sum(metadata.num_rows for _, metadata in shards), bool), 0
    is_kept[kept] = True
    for path, metadata in tqdm(shards, "copying", unit="shard", disable=None):
        chosen = pa.array(is_kept[first : first + metadata.num_rows])
        first += metadata.num_rows
        for batch in read_columns([path]).filter(chosen).to_batches(BATCH_ROWS):
            for row in batch.to_pylist():
                yield row, batch.nbytes // batch.num_rows


def find_good(files: list[Path], choice: PairsFlags) -> tuple[np.ndarray, list[str]]:
    """The numbers of the rows with good scores, and lines that say how many reach what."""
    table = read_columns(files, [*sum(SCORES.values(), ()), *TEXTS])[: choice.max_pairs]
    good, lines = np.ones(len(table), bool), []
    for name, columns in SCORES.items():
        if (least := getattr(choice, name)) is None:
            continue
        # Double precision, as make_pairs.py compares; NaN reaches nothing.
        scores = np.min([table[x].to_numpy().astype(np.float64) for x in columns], axis=0)
        best = np.fmax.reduce(scores, initial=-np.inf)
        lines.append(f"{(scores >= least).sum()} reach --{name} {least} (best {best:.4f})")
        good &= scores >= least
    kept = np.flatnonzero(good)
    if choice.num_kept:
        direction = table["clip_direction"].to_numpy()[kept]
        texts = [*zip(*(table[name].take(kept).to_pylist() for name in TEXTS))]
        ranks, counts = np.empty(len(kept), int), Counter()
        for place in np.argsort(-direction, kind="stable"):  # NaN last
            ranks[place] = counts[texts[place]]
            counts[texts[place]] += 1
        kept = kept[ranks < choice.num_kept]
        lines.append(f"{len(kept)} of them with --num_kept {choice.num_kept}")
    return kept, lines


def map_rows(
    groups: Iterable[tuple[RowGroup, Iterable[int]]], function: Callable
) -> Iterator[tuple[RowGroup, int, Future]]:
    """Work on rows of row groups in threads.

    Args:
        groups: each with positions of rows.
        function: of (cells, position).

    Yields:
        (row group, position, future of function), in order.
    """
    with ThreadPoolExecutor() as pool, tqdm(desc="checking", unit="row", disable=None) as bar:
        ahead = deque()
        for group, positions in groups:
            cells = read_row_group(group) if positions else None
            for position in positions:
                future = pool.submit(function, cells, position)
                ahead.append((group, position, future))
                if len(ahead) > ROWS_AHEAD:
                    yield ahead.popleft()
                bar.update()
        yield from ahead


def positions_of(groups: list[RowGroup], rows: np.ndarray) -> list[tuple[RowGroup, list[int]]]:
    """Row groups with the positions of some rows; rows: sorted, counted over all row groups."""
    stops = np.cumsum([group.num_rows for group in groups])
    parts = np.split(rows, np.searchsorted(rows, stops[:-1]))
    starts = stops - [group.num_rows for group in groups]
    return [(group, (part - start).tolist()) for group, part, start in zip(groups, parts, starts)]


def measure_pair(cells: Cells, position: int) -> tuple[Pair | None, str, Measured]:
    """A pair, its instructions as one text, and what its faults are judged by.

    Without a pair if it cannot be read.
    """
    try:
        pair = pair_at(cells, position)
    except ValueError:
        return None, "", Measured(("unreadable",))
    texts = pair.instruction or ""
    text = texts if isinstance(texts, str) else "\n".join(texts)
    return pair, text, measure(pair.original or b"", pair.edited or b"")


def find_faultless(
    groups: list[RowGroup], rows: np.ndarray, choice: PairsFlags
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The rows without a fault that are kept, those that are held out, and lines for a summary.

    Args:
        groups: row groups of the shards.
        rows: to choose from.
        choice: faults and number of originals; unreadable pairs are always left out.
    """
    finder, good, keys, counts = FaultFinder(), [], [], Counter()
    dropped = (*choice.drop, "unreadable")
    measured = map_rows(positions_of(groups, rows), measure_pair)
    for row, (_, _, future) in zip(rows.tolist(), measured):
        pair, text, values = future.result()
        found = finder.find(values, text, dropped)
        if faults := [fault for fault in found if fault in dropped]:
            counts[faults[0]] += 1
        else:
            good.append(row)
            images = (hashlib.sha256(data).digest() for data in pair[:2])
            keys.append((*images, False))
    lines = [f"left out {count} pairs: {name}" for name, count in counts.items()]
    good, is_held_out = np.array(good, int), np.zeros(len(good), bool)
    if choice.num_held_out:
        is_held_out = choose_held_out(keys, choice.num_held_out, choice.seed)
    return good[~is_held_out], good[is_held_out], lines


def images_and_texts(groups: list[RowGroup], rows: np.ndarray) -> Iterator[tuple[dict, dict]]:
    """Images and texts of rows, as write_held_out takes them."""
    for group, positions in positions_of(groups, rows):
        if not positions:
            continue
        cells = read_row_group(group)
        with pq.ParquetFile(group.path) as file:
            names = [name for name in CAPTIONS if name in file.schema_arrow.names]
            captions = file.read_row_group(group.index, columns=names)
        for position in positions:
            pair = pair_at(cells, position)
            images = {"original": pair.original, "edited": pair.edited}
            images |= {"mask": pair.mask, "reference": pair.reference}
            texts = dict.fromkeys(CAPTIONS)
            texts |= {name: captions[name][position].as_py() for name in names}
            texts["edit_prompt"] = choose_instruction(pair.instruction, 0)
            yield {role: (image_suffix(x), x) for role, x in images.items() if x}, texts
