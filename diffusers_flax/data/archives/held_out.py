"""Original images that a conversion holds out, with all their pairs.

choose(plan, source, 100, seed=0)
held_out = HeldOut(plan, folder, Path("held_out"))  # folder: for files until the end
held_out.take(pair_id, pair)  # False: the pair is for training
held_out.finish()  # held_out/edits.jsonl, as evaluate_edits.py --pairs_jsonl reads it
"""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from diffusers_flax.data.archives.finder import Finder
from diffusers_flax.data.archives.index import one_line_errors
from diffusers_flax.data.archives.plan import Plan, ShardColumns, Source
from diffusers_flax.data.archives.reader import Pair
from diffusers_flax.data.pairs import (
    COPIES,
    HELD_OUT_LIST,
    IMAGE_DIRS,
    MASK_DIR,
    held_out_edit,
    move_when_complete,
)
from diffusers_flax.data.shards import READ_ROWS
from diffusers_flax.images import open_image
from diffusers_flax.loading.files import remove, write_text

FOLDER = "held_out"  # in the directory of an incomplete conversion
TABLES = """
create table if not exists held_out (pair integer primary key);
create table if not exists held_out_images (size integer, sha256 blob);
delete from held_out; delete from held_out_images;
"""


def choose(plan: Plan, source: Source, number: int, seed: int) -> None:
    """Choose original images, and note their pairs in the plan.

    Pairs go together if they have the original image, or if one edits the other's result, as turns
    do; of an index by file, and turns of one row; of shards by content.

    Args:
        plan: with pairs.
        source: of the plan.
        number: of original images, or of sequences of turns.
        seed: of the choice.

    Raises:
        ValueError: no image is left for training.
    """
    ids, keys, same_row = [], [], []
    for pair, *pair_keys, is_turn in keys_of(plan, source):
        ids.append(pair)
        keys.append(pair_keys)
        same_row.append(is_turn)
    groups = group_originals(np.array(keys, np.int64).reshape(-1, 2), np.array(same_row, bool))
    num_groups = groups.max(initial=-1) + 1
    if not number < num_groups:
        raise ValueError(
            f"--num_held_out {number} must be less than the {num_groups} original images"
        )
    chosen = np.random.default_rng(seed).permutation(num_groups)[:number]
    held_out = [(ids[n],) for n in np.flatnonzero(np.isin(groups, chosen))]
    plan.db.executescript(TABLES)
    plan.db.executemany("insert into held_out values (?)", held_out)
    if not source.are_shards:  # copies of these images under other names are not trained on
        finder = Finder(plan.db, source)
        places = (json.loads(plan.record(pair))["original"] for (pair,) in held_out)
        images = ((place[2], finder.content(place)) for place in places)
        plan.db.executemany("insert into held_out_images values (?, ?)", images)
    plan.put(chosen=True)


def key_of(value: bytes) -> int:
    """A hash that fits into int64."""
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "big", signed=True)


def keys_of(plan: Plan, source: Source) -> Iterator[tuple[int, int, int, bool]]:
    """(pair, key of its original image, of its edited image, whether it is of the row before)."""
    rows = plan.db.cursor().execute("select id, name, record from pairs order by id")
    if source.are_shards:
        images = images_of(source)
        for (pair, _, _), (original, edited) in zip(rows, images):
            yield pair, key_of(original), key_of(edited), False
        return
    before = ""
    for pair, name, record in rows:
        places = json.loads(record)
        row, turn, _ = name.rpartition(" turn ")
        keys = (key_of(repr(places[role]).encode()) for role in ("original", "edited"))
        yield pair, *keys, bool(turn) and row == before
        before = row if turn else ""


def images_of(source: Source) -> Iterator[tuple[bytes, bytes]]:
    """The images of all rows of shards, or their paths."""
    for shard in source.archives:
        file = shard.parts[0]
        names = list(ShardColumns.of(file)[:2])
        with one_line_errors(file), pq.ParquetFile(file, pre_buffer=False) as opened:
            for batch in opened.iter_batches(READ_ROWS, columns=names, use_threads=False):
                for row in batch.to_pylist():
                    yield tuple(cell_bytes(row[name]) for name in names)


def cell_bytes(cell) -> bytes:
    """An image cell as bytes: its image, else its path."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    return cell.encode() if isinstance(cell, str) else cell or b""


def group_originals(keys: np.ndarray, same_row: np.ndarray) -> np.ndarray:
    """The group of each pair, numbered in the order of appearance, int64 (n,).

    Args:
        keys: of the original and of the edited image, int64 (n, 2).
        same_row: whether a pair goes with the one before, bool (n,).
    """
    known, first, number = np.unique(keys[:, 0], return_index=True, return_inverse=True)
    root = np.arange(len(known))

    def find(n):
        while root[n] != n:
            root[n] = n = root[root[n]]
        return n

    results = np.searchsorted(known, keys[:, 1]).clip(max=max(len(known) - 1, 0))
    is_edited = known[results] == keys[:, 1] if len(known) else np.zeros(0, bool)
    links = [(number[n], results[n]) for n in np.flatnonzero(is_edited)]
    links += [(number[n], number[n - 1]) for n in np.flatnonzero(same_row)]
    for one, other in links:
        root[find(one)] = find(other)
    roots = np.array([find(n) for n in range(len(known))], np.int64)
    earliest = np.full(len(known), len(keys))
    np.minimum.at(earliest, roots, first)
    order = np.argsort(earliest, kind="stable")
    rank = np.empty(len(known), np.int64)
    rank[order] = np.arange(len(known))  # those that are no roots come last
    return rank[roots[number]]


class HeldOut:
    """Writes pairs that are held out to files."""

    def __init__(self, plan: Plan, folder: Path, final_folder: Path):
        """plan: with the choice; folder: for files until the end, when they go to final_folder."""
        self._folder, self._final = folder / FOLDER, final_folder
        rows = plan.db.execute("select pair from held_out order by pair").fetchall()
        self._numbers = {pair: number for number, (pair,) in enumerate(rows)}
        rows = plan.db.execute("select size, sha256 from held_out_images").fetchall()
        self._sizes, self._contents = {size for size, _ in rows}, {sha256 for _, sha256 in rows}
        for name in IMAGE_DIRS:
            (self._folder / name).mkdir(parents=True, exist_ok=True)

    def is_copy(self, pair: Pair) -> bool:
        """Whether a pair for training has an original image that is held out."""
        data = pair.cells["original"]["bytes"]
        return len(data) in self._sizes and hashlib.sha256(data).digest() in self._contents

    def take(self, pair_id: int, pair: Pair) -> bool:
        """Write a pair if it is held out; a later start may write it again."""
        number = self._numbers.get(pair_id)
        if number is None:
            return False
        names = {}
        for role, name in zip(("original", "edited", "mask"), (*IMAGE_DIRS, MASK_DIR)):
            if cell := pair.cells[role]:
                kind = open_image(io.BytesIO(cell["bytes"])).format.lower()
                names[role] = f"{number:05d}.{kind.replace('jpeg', 'jpg')}"
                file = self._folder / name / names[role]
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(cell["bytes"])
        captions = pair.texts["original_prompt"], pair.texts["edited_prompt"]
        edit = held_out_edit(number, names, pair.texts["edit_prompt"][0], captions)
        text = json.dumps(edit, ensure_ascii=False) + "\n"
        write_text(self._folder / f"{number:05d}.json", text)
        return True

    def finish(self) -> str:
        """Copy the files to the final directory; a line that says how many pairs."""
        lines = sorted(self._folder.glob("*.json"), key=lambda file: int(file.stem))
        if not lines:
            return "held out    0 pairs: no archive of this worker has one"
        remove(self._final / ".unfinished")  # of a start that was killed here
        with move_when_complete(self._final, (*IMAGE_DIRS, MASK_DIR, HELD_OUT_LIST)) as folder:
            for name in (*IMAGE_DIRS, MASK_DIR):
                if (self._folder / name).exists():
                    shutil.copytree(self._folder / name, folder / name)
            text = "".join(file.read_text(encoding="utf-8") for file in lines)
            write_text(folder / HELD_OUT_LIST, text)
        return f"held out    {len(lines)} pairs: {self._final / HELD_OUT_LIST}; {COPIES}"
