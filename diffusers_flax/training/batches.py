"""Batches of a training run: open the dataset, prefetch batches to the devices."""

import itertools
import time
from collections import deque

import jax

from diffusers_flax.data.dataset import ParquetImagePairs
from diffusers_flax.data.mixture import Mixture
from diffusers_flax.data.options import Columns, Reading, Transform
from diffusers_flax.training.flags import Config, chosen_columns, chosen_sizes
from diffusers_flax.training.latents import latent_dirs, write_latents
from diffusers_flax.training.models import (
    check_models,
    is_sdxl,
    mixed_precision_dtype,
    open_modules,
)
from diffusers_flax.training.processes import all_processes, wait_for_all
from diffusers_flax.training.sharding import shard_batch

MAX_STEPS_IN_FLIGHT = 2  # steps by which the host may be ahead of the devices; batches to prefetch


def open_dataset(config: Config):
    """Open --train_data_dir, or --cache_latents after writing its missing shards."""
    directories = config.train_data_dir
    columns = chosen_columns(config, masks=config.mask_loss_weight != 1)
    if config.cache_latents:
        # before hours of encoding
        check_models(config, open_modules(config, mixed_precision_dtype(config)))
        write_latents(config, config.cache_latents, columns)
        wait_for_all("latents are cached")
        directories = latent_dirs(config.train_data_dir, config.cache_latents)
        columns = Columns(mask=columns.mask and "")  # latents have columns of known names
    options = dict(
        batch_size=config.train_batch_size // jax.process_count(),
        columns=columns,
        transform=Transform(
            resolution=config.resolution,
            sizes=chosen_sizes(config),
            random_crop=config.random_crop,
            random_flip=config.random_flip,
            resample=config.image_interpolation_mode,
            micro_conditioning=is_sdxl(config),
        ),
        seed=config.seed,
        processes=all_processes(),
        reading=Reading(
            max_rows=config.max_train_samples,
            shuffle_buffer=config.shuffle_buffer,
            num_threads=config.dataloader_num_workers,
            max_bad_fraction=config.max_bad_fraction,
        ),
    )
    if len(directories) == 1:
        return ParquetImagePairs(directories[0], **options)
    return Mixture(directories, config.train_data_weights, **options)


class Batches:
    """An endless iterator of batches on the devices, with prefetching.

    Args:
        dataset: ParquetImagePairs or Mixture.
        tokenize: list of prompts -> ids (B, T).
        start_step: number of completed steps, whose batches are skipped.

    Attributes:
        num_bad: undecodable pairs in this process's batches so far.
        seconds_waited: time spent waiting for batches; readers may reset it.
        handed_over: time.perf_counter() and time.thread_time() at the end of the last `next`.
    """

    def __init__(self, dataset, tokenize, start_step=0):
        dataset.set_step(start_step)
        self.num_bad, self.seconds_waited, self.handed_over = 0, 0.0, None
        self.dataset = dataset
        self.stream = self._endless_batches(dataset, tokenize)
        self.queue = deque(itertools.islice(self.stream, MAX_STEPS_IN_FLIGHT))

    @staticmethod
    def _endless_batches(dataset, tokenize):
        while True:
            for batch in dataset:
                batch = {"input_ids": tokenize(batch.pop("edit_prompt")), **batch}
                yield shard_batch(batch), dataset.num_bad

    def __iter__(self):
        return self

    def __next__(self):
        wait_start = time.perf_counter()
        batch, self.num_bad = self.queue.popleft()
        self.queue.append(next(self.stream))
        self.handed_over = time.perf_counter(), time.thread_time()
        self.seconds_waited += self.handed_over[0] - wait_start
        return batch

    def peek(self):
        """Return the next batch without consuming it."""
        return self.queue[0][0]

    def shapes(self):
        """{size: shapes and dtypes of a batch}, with the dataset's names of sizes."""
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.peek())
        return {
            size: batch
            | {
                name: jax.ShapeDtypeStruct((*batch[name].shape[:2], *shape), batch[name].dtype)
                for name, shape in shapes.items()
            }
            for size, shapes in self.dataset.image_shapes().items()
        }

    def close(self):
        """Stop the dataset's threads and free the batches."""
        self.stream.close()
        self.queue.clear()
