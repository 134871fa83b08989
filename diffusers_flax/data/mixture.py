"""Training batches from several directories of pairs, drawn by weight.

    for batch in Mixture(["magicbrush", "ultraedit"], [1, 3], batch_size=16): ...

One directory is opened by dataset.ParquetImagePairs.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.buckets import BUCKETS
from diffusers_flax.data.dataset import Partition, refuse_torch_workers, register_with_torch
from diffusers_flax.data.options import Columns, Processes, Reading, Transform
from diffusers_flax.data.reading import BatchRow, StoredPairs, decode_batches, stream_settings
from diffusers_flax.data.shards import MASK, MASK_COLUMNS, shard_files
from diffusers_flax.data.streaming import is_remote, list_files, read_footer
from diffusers_flax.messages import differences

DRAWS_PER_COUNT = 4  # numbers per value of Philox's counter
STEPS_AT_ONCE = 4096  # in count_draws, to save memory


class Mixture:
    """Batches of pairs from several directories ("sets"); each row is drawn from a set by weight.

    The set of a row of a global batch depends only on the seed, the step and the row. The j-th row
    drawn from a set is the j-th of the set's stream: all of its rows in the order of
    ParquetImagePairs with one part, then all of them again in another order, and so on. Each pass
    draws every row once. Sets may have different columns and numbers of rows.

    An iteration yields batches without end, as ParquetImagePairs does. The next iteration continues
    after the last batch yielded.

    If all processes have the same shards of a set, a process takes the rows of its slice of the
    global batches, which are the same for any number of processes. If each process has its own
    shards of a set, it has its own stream of them. Sets of both kinds may be mixed.

    Undecodable pairs are replaced by pairs of the same set. Each set takes the memory of
    a ParquetImagePairs, with a window of shuffle_buffer * share rows.

    `state_dict()` is the position after the last batch yielded. A mixture with the same arguments
    that loads it continues with the next batch, bit for bit.

    Args:
        train_data_dirs: directories or URLs of *.parquet files, all with images or all with
            latents of one VAE and size.
        weights: above 0, one per directory; (): the numbers of pairs.
        batch_size: pairs per batch of this process.
        columns: a name applies to the sets that have this column; other sets use known names. With
            masks or reference images at least one set must have them.
        transform: without sizes.
        seed: at least 0.
        processes, reading: see options.py.

    Attributes:
        sets: StoredPairs of each directory.
        names: names of the sets: the shortest distinct ends of their paths.
        shares: fractions of a batch, one per set.
        latents: latents_metadata of the shards, None if they have images.
        sizes, decoding: see StoredPairs.

    Raises:
        ValueError: see ParquetImagePairs; also weights that do not fit, a directory named twice,
            or sets of images and of latents.
    """

    def __init__(
        self,
        train_data_dirs: Sequence[str],
        weights: Sequence[float] = (),
        *,
        batch_size: int,
        columns: Columns = Columns(),
        transform: Transform = Transform(),
        seed: int = 0,
        processes: Processes = Processes(),
        reading: Reading = Reading(),
    ):
        register_with_torch(type(self))
        check_sets(train_data_dirs, weights, transform.sizes)
        self.sets = [
            StoredPairs(
                directory,
                own,
                transform,
                processes,
                reading,
                masks=columns.mask is not None,
                references=columns.reference_image is not None,
            )
            for directory, own in zip(train_data_dirs, columns_of_sets(train_data_dirs, columns))
        ]
        first = self.sets[0]
        for pairs in self.sets:
            first.decoding.check(pairs.groups[0])
        self.latents, self.sizes, self.decoding = first.latents, first.sizes, first.decoding
        weights = np.asarray(weights or [pairs.num_rows for pairs in self.sets], np.float64)
        self.shares = (weights / weights.sum()).tolist()
        self.train_data_dir = ", ".join(map(str, train_data_dirs))
        self.names = distinct_names(train_data_dirs)
        self.global_batch_size = batch_size * processes.process_count
        self.seed, self.reading = seed, reading
        # Of a global batch: this process's rows, and for each set the rows that draw from the
        # stream that this process reads.
        first_row = processes.process_index * batch_size
        self._own_rows = range(first_row, first_row + batch_size)
        everyones = range(self.global_batch_size)
        self._drawing = [
            everyones if len(pairs.directories) == 1 else self._own_rows for pairs in self.sets
        ]
        self._partitions = [one_part(pairs, number) for number, pairs in enumerate(self.sets)]
        self._step = 0  # of the next batch
        self._counted = 0, np.zeros(len(self.sets), np.int64)  # a step, and the draws before it
        identities = [pairs.identity() for pairs in self.sets]
        self._stream_identity = {
            "seed": seed,
            "global_batch_size": self.global_batch_size,
            "shares": self.shares,
            **stream_settings(transform, reading),
            **{name: [identity[name] for identity in identities] for name in identities[0]},
        }

    @property
    def num_bad(self) -> int:
        """Replaced pairs in the batches of this object."""
        return sum(pairs.num_bad for pairs in self.sets)

    def describe_epoch(self) -> str:
        """Describe the sets: pairs and fraction of a batch."""
        sets = [
            f"{name} ({pairs.num_rows} pairs, {share:.1%} of a batch)"
            for name, pairs, share in zip(self.names, self.sets, self.shares)
        ]
        return f"a mixture of {', '.join(sets)}"

    def passes(self, step: int) -> dict[str, float]:
        """{set: number of passes, a fraction included} before a step."""
        counts = self.count_draws(step).tolist()
        rows = [sum(partition.num_batches) for partition in self._partitions]
        return {name: count / n for name, count, n in zip(self.names, counts, rows)}

    def count_draws(self, step: int) -> np.ndarray:
        """Number of rows drawn from this process's stream of each set before a step."""
        first, counts = self._counted
        first, counts = (0, np.zeros_like(counts)) if step < first else (first, counts.copy())
        for start in range(first, step, STEPS_AT_ONCE):
            sets = self.draw_sets(start, min(STEPS_AT_ONCE, step - start))
            for number, rows in enumerate(self._drawing):
                drawn = sets[:, rows.start : rows.stop]
                counts[number] += np.count_nonzero(drawn == number)
        self._counted = step, counts
        return counts

    def draw_sets(self, first_step: int, num_steps: int) -> np.ndarray:
        """The set of each row of global batches, integers (num_steps, global batch size)."""
        counts_per_step = math.ceil(self.global_batch_size / DRAWS_PER_COUNT)
        key = np.random.SeedSequence(self.seed).generate_state(2, np.uint64)
        bits = np.random.Philox(key=key).advance(first_step * counts_per_step)
        u = np.random.Generator(bits).random((num_steps, counts_per_step * DRAWS_PER_COUNT))
        sets = np.zeros((num_steps, self.global_batch_size), np.int16)
        for bound in itertools.accumulate(self.shares[:-1]):
            sets += u[:, : self.global_batch_size] >= bound
        return sets

    def set_step(self, step: int) -> None:
        """Select the first batch of the next iteration, counted from 0."""
        self._step = step

    def state_dict(self) -> dict:
        """Position and identity of the stream of batches; the same on every process."""
        return {"step": self._step, **self._stream_identity}

    def load_state_dict(self, state: dict) -> None:
        """Continue the next iteration at the position of a `state_dict`.

        Raises:
            ValueError: the state belongs to another stream; names all differences.
        """
        if different := differences(state, self._stream_identity):
            raise ValueError(f"cannot resume the data: {'; '.join(different)}")
        self._step = state["step"]

    def __iter__(self) -> Iterator[dict]:
        refuse_torch_workers()
        batches = decode_batches(self._read_batches, self.reading)
        with contextlib.closing(batches):
            for batch in batches:
                self._step += 1
                yield batch

    def _read_batches(self, threads: Executor) -> Iterator[list[BatchRow]]:
        """Yield the rows of this process's batches from the next step on; see decode_batches."""
        first_step = self._step
        streams = [
            self._stream(number, int(count), threads)
            for number, count in enumerate(self.count_draws(first_step))
        ]
        try:
            for step in itertools.count(first_step):
                rows = []
                for place, number in enumerate(self.draw_sets(step, 1)[0].tolist()):
                    if place in self._drawing[number]:
                        (row,) = next(streams[number])  # also if another process decodes it
                        if place in self._own_rows:
                            rows.append(row)
                yield rows
        finally:
            for stream in streams:
                stream.close()

    def _stream(self, number: int, first: int, threads: Executor) -> Iterator[list[BatchRow]]:
        """Yield the rows of a set in the order drawn, one by one, from number `first` on."""
        pairs, partition = self.sets[number], self._partitions[number]
        (num_rows,) = partition.num_batches
        buffer = self.reading.shuffle_buffer * self.shares[number]
        first_pass, skipped = divmod(first, num_rows)
        epochs = (
            partition.shuffle(pairs, self.seed, number_of_pass, buffer)
            for number_of_pass in itertools.count(first_pass)
        )
        rest = next(epochs).after(skipped)
        return pairs.read_batches(itertools.chain([rest], epochs), threads)


def one_part(pairs: StoredPairs, number: int) -> Partition:
    """The Partition of the passes of set `number`: this process's rows of the set one by one."""
    if len(pairs.directories) == 1:
        return Partition((pairs.directory_rows[0],), ((number,),))
    own = pairs.processes.process_index
    # The order belongs to the shards, whichever process has them.
    shard_seed = (number, *pairs.directories[own][0][:2])
    return Partition(
        (pairs.directory_rows[own],), (shard_seed,), total_parts=len(pairs.directories)
    )


def check_sets(
    train_data_dirs: Sequence[str],
    weights: Sequence[float] = (),
    sizes: tuple[tuple[int, int], ...] | None = None,
) -> None:
    """Raise a ValueError for directories, weights or sizes that do not fit together."""
    if not train_data_dirs:
        raise ValueError("--train_data_dir is empty; name a directory of *.parquet files")
    if len({Path(directory).resolve() for directory in train_data_dirs}) < len(train_data_dirs):
        raise ValueError(
            f"--train_data_dir {' '.join(map(str, train_data_dirs))} names a directory twice; name "
            "it once, and raise its weight with --train_data_weights"
        )
    if sizes is not None and len(train_data_dirs) > 1:
        raise ValueError(f"{BUCKETS} goes with one --train_data_dir; leave out {BUCKETS}")
    if weights and not (len(weights) == len(train_data_dirs) > 1 and min(weights) > 0):
        raise ValueError(
            f"--train_data_weights {' '.join(format(weight, 'g') for weight in weights)}: give a "
            "weight for each of several --train_data_dir, above 0, or none"
        )


def columns_of_sets(train_data_dirs: Sequence[str], columns: Columns) -> list[Columns]:
    """Columns of each set: its names, "" to find a known name, None: no masks or reference images.

    A name that no set has goes to all sets, so that opening the first raises the error.
    """
    shards = map(first_metadata, train_data_dirs)
    names = [{*shard.schema.to_arrow_schema().names} if shard else set() for shard in shards]
    all_names, mask_names = set().union(*names), {MASK, *MASK_COLUMNS, columns.mask}
    given = columns.original_image, columns.edited_image, columns.edit_prompt
    all_columns = []
    for own in names:
        mask = columns.mask
        is_known = all_names & mask_names and (mask in all_names or not mask)
        if mask is not None and is_known and mask not in own:
            mask = "" if own & mask_names else None
        of_pairs = (name if name in own or name not in all_names else "" for name in given)
        reference = columns.reference_image
        if reference in all_names - own:
            reference = None
        all_columns.append(Columns(*of_pairs, mask, reference))
    return all_columns


def first_metadata(directory: str) -> pq.FileMetaData | None:
    """The metadata of a directory's first shard; None if it cannot be read."""
    try:
        if is_remote(directory):
            return read_footer(list_files(directory)[0])
        return pq.read_metadata(shard_files(directory)[0])
    except (pa.ArrowException, OSError, IndexError):  # list_row_groups says what is wrong
        return None


def distinct_names(directories: Sequence[str]) -> list[str]:
    """The shortest distinct ends of paths."""
    # Without ".." and the root, as subdirectories have such names too.
    parts = [Path(os.path.abspath(directory)).parts[1:] for directory in directories]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names
