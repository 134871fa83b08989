"""Batches of a training run: open the dataset, prefetch batches to the devices."""

import itertools
import time
from collections import deque

import jax

from diffusers_flax.data.buckets import size_name
from diffusers_flax.data.dataset import ParquetImagePairs
from diffusers_flax.data.mixture import Mixture
from diffusers_flax.data.options import Columns, Reading, Transform
from diffusers_flax.data.shards import REFERENCE
from diffusers_flax.training.flags import check_schedules, chosen_columns, chosen_sizes
from diffusers_flax.training.latents import latent_dirs, write_latents
from diffusers_flax.training.models import is_sdxl, mixed_precision_dtype, open_modules
from diffusers_flax.training.processes import all_processes, wait_for_all
from diffusers_flax.training.sharding import compile_pmapped, shard_batch

MAX_STEPS_IN_FLIGHT = 2  # steps by which the host may be ahead of the devices; batches to prefetch


def open_dataset(config):
    """Open --train_data_dir, or --cache_latents after writing its missing shards."""
    directories = config.train_data_dir
    models = open_modules(config, mixed_precision_dtype(config))  # errors before hours of encoding
    has_references = models.unet.takes_reference
    columns = chosen_columns(config, config.mask_loss_weight != 1, has_references)
    if config.cache_latents:
        write_latents(config, config.cache_latents, columns)
        wait_for_all("latents are cached")
        directories = latent_dirs(config.train_data_dir, config.cache_latents)
        reference = REFERENCE if has_references else None
        columns = Columns(mask=columns.mask and "", reference_image=reference)  # known names
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


def length_of_run(config, dataset):
    """Number of steps of a run, of --max_train_steps or --num_train_epochs.

    Raises:
        ValueError: schedules do not fit into it.
    """
    num_steps = config.max_train_steps
    if config.num_train_epochs is not None:
        num_steps = config.num_train_epochs * len(dataset)
    check_schedules(config, num_steps)
    return num_steps


class Batches:
    """An endless iterator of batches on the devices, with prefetching.

    Args:
        dataset: ParquetImagePairs or Mixture.
        tokenize: list of prompts -> ids (B, T).
        start_step: number of completed steps, whose batches are skipped.

    Attributes:
        num_bad: undecodable pairs in this process's batches so far.
        seconds_waited: time spent waiting for batches; readers may reset it.
    """

    def __init__(self, dataset, tokenize, start_step=0):
        dataset.set_step(start_step)
        self.num_bad, self.seconds_waited = 0, 0.0
        self.dataset = dataset
        self.stream = self._endless_batches(dataset, tokenize)
        self.queue = deque(itertools.islice(self.stream, MAX_STEPS_IN_FLIGHT))

    @staticmethod
    def _endless_batches(dataset, tokenize):
        while True:
            for batch in dataset:
                batch = {"input_ids": tokenize(batch.pop("edit_prompt")), **batch}
                yield shard_batch(batch), dataset.num_bad

    def __next__(self):
        wait_start = time.perf_counter()
        batch, self.num_bad = self.queue.popleft()
        self.queue.append(next(self.stream))
        self.seconds_waited += time.perf_counter() - wait_start
        return batch

    def shapes(self):
        """{size: shapes and dtypes of a batch}; without buckets the only size is ""."""
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.queue[0][0])
        sizes, shapes = self.dataset.sizes, {}
        for number, size in enumerate(sizes):
            arrays = self.dataset.decoding.empty_batch(0, number)
            name = size_name(size) if len(sizes) > 1 else ""
            shapes[name] = batch | {
                key: jax.ShapeDtypeStruct((*batch[key].shape[:2], *x.shape[1:]), batch[key].dtype)
                for key, x in arrays.items()
            }
        return shapes

    def close(self):
        """Stop the dataset's threads and free the batches."""
        self.stream.close()
        self.queue.clear()


def compile_steps(p_train_step, state, p_frozen, batches, p_rng):
    """Compile a training step for the batches of every size.

    Args:
        p_train_step: pmapped train_step.
        state: state_shapes for all devices.
        p_frozen, p_rng: as for train_step, replicated.
        batches: Batches.

    Returns:
        A function like p_train_step, for global arrays.
    """
    programs, shapes = {}, batches.shapes()
    for number, (size, batch) in enumerate(shapes.items(), start=1):
        start = time.perf_counter()
        arguments = state, p_frozen, batch, p_rng
        programs[shapes_of(batch)] = compile_pmapped(p_train_step, *arguments)
        if size and jax.process_index() == 0:
            seconds = time.perf_counter() - start
            print(f"compiled {size} in {seconds:.3g} s, {number} of {len(shapes)}", flush=True)
    wait_for_all("all sizes are compiled")

    def step(state, p_frozen, batch, p_rng):
        return programs[shapes_of(batch)](state, p_frozen, batch, p_rng)

    return step


def shapes_of(batch):
    """The shapes of a batch's arrays, to look up its program."""
    return frozenset((name, x.shape) for name, x in batch.items())
