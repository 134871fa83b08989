"""Training batches from parquet shards: a plain iterator, and a torch IterableDataset.

    for batch in ParquetImagePairs("data", batch_size=16): ...

Images are prepared as in InstructPix2Pix (arXiv 2211.09800).
"""

import contextlib
import math
import sys
from collections.abc import Iterator

import numpy as np

from dataloading.options import Columns, Processes, Reading, Transform, check_at_least
from dataloading.order import choose_num_parts, partition_rows, size_name
from dataloading.reading import BatchRow, StoredPairs, decode_batches, stream_settings
from diffusers_flax.messages import differences

MIN_LEFT_OUT = 0.01  # share of an epoch's pairs for which a better batch size is looked up


def register_with_torch(dataset_class: type) -> None:
    """Register a class as a torch IterableDataset if torch is already imported.

    Subclassing IterableDataset would import torch, which takes seconds, for all users.
    """
    if "torch.utils.data" in sys.modules:
        sys.modules["torch.utils.data"].IterableDataset.register(dataset_class)


def in_torch_worker() -> bool:
    """Whether this process is a worker of a torch DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def refuse_torch_workers() -> None:
    """Raise a ValueError in a worker of a torch DataLoader."""
    if in_torch_worker():
        raise ValueError(
            "DataLoader's num_workers must be 0: ParquetImagePairs has its own threads; set "
            "num_threads instead"
        )


class ParquetImagePairs(StoredPairs):
    """Batches of image pairs and instructions from a directory of parquet shards.

    One iteration yields one epoch of this process's batches; every process gets `len(self)` of
    them. The next iteration yields the next epoch, unless `set_epoch` selects another. If torch is
    imported before the object is created, the object is a torch IterableDataset:
    `DataLoader(dataset, batch_size=None)`. A batch is a dict:

        original_pixel_values, edited_pixel_values: uint8 (B, R, R, 3); (B, H, W, 3) with sizes
        edit_prompt: list of B strings

    or, for a directory written by cache_latents.py, with latents instead of images:

        original_latents: float16 (B, h, w, C)
        edited_latents: float16 (B, h, w, 2 C)

    and, with micro_conditioning, `time_ids`, float32 (B, 6), see `decoding.decode_pair`; with
    mask_column, `mask`, uint8 (B, R, R) or (B, h, w), 255 where a pair's image may change, 0 for
    pairs without a mask.

    Order: an epoch has `num_parts` parts, and a global batch concatenates equal slices of them. If
    all processes have the same shards, the parts cover all rows, and process i takes the i-th equal
    slice of every global batch; less than one global batch of rows is unused. If each process has
    its own shards, it makes its own parts and batches, and every process stops after as many
    batches as the process with the fewest rows has. Each epoch leaves out different rows and yields
    no row twice. Order, crops and flips depend on the data, seed, epoch, global batch size,
    `num_parts` and `shuffle_buffer` (see `order.epoch_order`). They do not depend on the number of
    threads or, if all processes have the same shards, on the number of processes.

    Sizes: with `sizes` every pair goes to the size that is nearest in aspect ratio to its image to
    edit, and a global batch has one size, the same on every process. A size with less than a global
    batch of pairs is left out; if each process has its own shards, a size of which one process has
    less than its share of a batch. The pairs of a size that do not fill a batch wait for the next
    epoch, in which they are used.

    Undecodable pairs: the next decodable row of the same row group, cyclically, replaces the pair
    and gets its crop and flip. If the row group has none, the following row groups are searched.
    With sizes only rows of the same size are searched.
    `num_bad` counts replaced pairs, `bad_rows` names their rows, and each is logged once.

    Memory: the encoded pairs of a window of shuffle_buffer / num_parts rows plus up to two row
    groups, for each part that the process reads, and at most all of its shards; one row group read
    ahead, one of its columns twice while it is read; `prefetch_batches` batches. With sizes also up
    to GROUPS_READ_AGAIN row groups that have such pairs, and the encoded pairs that wait
    until their batch is full: with one part and the same shards on all processes, less than a batch
    of each size. More wait with several parts or if each process has its own shards, as a batch
    waits for all of them: a few row groups, but most of the pairs if shards are sorted by shape.

    `state_dict()` is the position after the last batch yielded. A dataset with the same arguments
    that loads it continues with the next batch, bit for bit.

    Args:
        train_data_dir: directory of *.parquet files.
        batch_size: pairs per batch of this process.
        columns, transform, processes, reading: see options.py.
        seed: at least 0.
        num_parts: a divisor of the global batch size; 0: the greatest common divisor of the global
            batch size and DEFAULT_PARTS, with sizes 1.

    Raises:
        ValueError: an invalid argument, an invalid directory (see `list_row_groups` and
            `gather_directories`), or fewer rows than one batch; while iterating, damaged shards or
            too many pairs that cannot be used.
    """

    def __init__(
        self,
        train_data_dir: str,
        *,
        batch_size: int,
        columns: Columns = Columns(),
        transform: Transform = Transform(),
        seed: int = 0,
        processes: Processes = Processes(),
        reading: Reading = Reading(),
        num_parts: int = 0,
    ):
        register_with_torch(type(self))
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, seed=seed, num_parts=num_parts)
        global_batch_size = batch_size * processes.process_count
        if transform.sizes is not None:
            num_parts = num_parts or 1  # with more, more pairs wait until their batch is full
        num_parts = choose_num_parts(num_parts, batch_size, processes.process_count)

        super().__init__(train_data_dir, columns, transform, processes, reading)
        self._check_enough_rows(batch_size)
        if transform.sizes is not None:
            self.choose_sizes(batch_size)
        self._partition = partition_rows(
            self.directories, self.size_rows, batch_size, num_parts, processes
        )
        self.epoch_rows = len(self) * global_batch_size
        self.batch_size, self.seed, self.num_parts = batch_size, seed, num_parts
        self.epoch = 0
        self._first_batch = 0  # at which the next iteration starts
        self._next_batch = 0  # position of state_dict
        self._stream_identity = {
            "seed": seed,
            "global_batch_size": global_batch_size,
            "num_parts": num_parts,
            **stream_settings(transform, reading),
            **self.identity(),
        }
        if transform.sizes is not None:
            self._stream_identity["sizes"] = " ".join(map(size_name, self.decoding.sizes))

    def _check_enough_rows(self, batch_size: int) -> None:
        """Raise a ValueError if a directory has less than one batch."""
        process_count, max_rows = self.processes.process_count, self.reading.max_rows
        is_shared = len(self.directory_rows) == 1
        num_rows, num_sharing = min(self.directory_rows), process_count if is_shared else 1
        if num_rows >= batch_size * num_sharing:
            return
        source = self.train_data_dir if is_shared else "the directory with the fewest rows"
        if max_rows is not None:
            source = f"--max_train_samples {max_rows} of {source}"
        most = num_rows // num_sharing
        remedy = f"use at most {most} pairs per process, --train_batch_size {most * process_count}"
        if num_rows < num_sharing:
            remedy = f"use at most {num_rows} processes"
        raise ValueError(
            f"a batch of {batch_size} pairs on each of {num_sharing} process(es) needs "
            f"{batch_size * num_sharing} pairs, but {source} has {num_rows}; {remedy}"
        )

    def describe_epoch(self, multiple: int = 1) -> str:
        """Say how many pairs an epoch uses, and a smaller batch that would leave out fewer.

        Args:
            multiple: the global batch size must be a multiple of it.

        Returns:
            "16 of 24 pairs per epoch (24 with --train_batch_size 12)"; the part in parentheses if
            a batch of at least half the size leaves out fewer, and more than MIN_LEFT_OUT are. With
            sizes without it: a smaller batch has other sizes, and what is left out waits.
        """
        global_batch_size = self._stream_identity["global_batch_size"]
        processes = global_batch_size // self.batch_size
        sharing = processes if len(self.directory_rows) == 1 else 1  # processes per directory

        def num_used(size):
            return min(self.directory_rows) // (size // processes * sharing) * size

        used, step = self.epoch_rows, math.lcm(multiple, processes)
        smaller = range(global_batch_size - step, (global_batch_size - 1) // 2, -step)
        best = max(smaller, key=num_used, default=global_batch_size)  # the largest of equals
        text = f"{used} of {self.num_rows} pairs per epoch"
        if self.directory_sizes is None and used < min(
            num_used(best), (1 - MIN_LEFT_OUT) * self.num_rows
        ):
            text += f" ({num_used(best)} with --train_batch_size {best})"
        return text

    def describe_sizes(self) -> str:
        """The sizes of the batches and their pairs over all processes; "" for squares only.

        Returns:
            "pairs by size: 384x640 12, 512x512 80; left out with less than a batch: 640x384".
        """
        if self.directory_sizes is None:
            return ""
        parts = zip(self.decoding.sizes, self.size_rows.sum(axis=0))
        counts = ", ".join(f"{size_name(size)} {count}" for size, count in parts)
        left_out = ", ".join(map(size_name, self.sizes_left_out))
        end = f"; left out with less than a batch: {left_out}" if left_out else ""
        return f"pairs by size: {counts}{end}"

    def __len__(self) -> int:
        """Batches per epoch of every process."""
        return sum(self._partition.num_batches)

    def __getitem__(self, index):
        """Raise a TypeError: DataLoader indexes objects that are not registered with torch."""
        raise TypeError(
            "import torch before creating ParquetImagePairs, so that DataLoader iterates over it"
        )

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, from 0, of the next iteration."""
        self.epoch, self._first_batch, self._next_batch = epoch, 0, 0

    def passes(self, step: int) -> dict[str, float]:
        """How often each of several sets was gone through, see Mixture; here there is one."""
        return {}

    def set_step(self, step: int) -> None:
        """Select the first batch of the next iteration, counted from 0 over all epochs."""
        self.epoch, self._first_batch = divmod(step, len(self))
        self._next_batch = self._first_batch

    def state_dict(self) -> dict:
        """Position and identity of the stream of batches; the same on every process."""
        return {"epoch": self.epoch, "batch": self._next_batch, **self._stream_identity}

    def load_state_dict(self, state: dict) -> None:
        """Continue the next iteration at the position of a `state_dict`.

        Raises:
            ValueError: the state belongs to another stream; names all differences.
        """
        if different := differences(state, self._stream_identity):
            raise ValueError(
                f"cannot resume the data: {'; '.join(different)}"
                + (" (other shards)" if state.get("data") != self._stream_identity["data"] else "")
            )
        if not (state["epoch"] >= 0 and 0 <= state["batch"] < len(self)):
            raise ValueError(
                f"epoch={state['epoch']}, batch={state['batch']} is not a position in an epoch "
                f"of {len(self)} batches"
            )
        self.epoch, self._first_batch = state["epoch"], state["batch"]
        self._next_batch = self._first_batch

    def __iter__(self) -> Iterator[dict]:
        refuse_torch_workers()
        start, self._first_batch = self._first_batch, 0
        self._next_batch = start
        order, read_steps, draws = self._partition.shuffle(
            [group.num_rows for group in self.groups],
            self.seed,
            self.epoch,
            self.reading.shuffle_buffer,
            self.directory_sizes,
        )
        if self.directory_sizes:
            found = self.read_waiting(order[start:], np.maximum(read_steps[start:] - start, 0))
        else:
            found = self.read_batches([order[start:]])
        encoded = (
            [BatchRow(self, row, of_row, draws[row]) for row, of_row in rows] for rows in found
        )
        batches = decode_batches(encoded, self.reading)
        with contextlib.closing(batches):
            for step, batch in enumerate(batches, start=start + 1):
                self._next_batch = step
                if step == len(self):
                    self.epoch, self._next_batch = self.epoch + 1, 0
                yield batch
