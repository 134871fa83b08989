"""Cache the VAE's latents of a dataset on disk, for cache_latents.py and --cache_latents."""

import contextlib
import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from diffusers_flax.command_line import check_writable
from diffusers_flax.data.buckets import SIZE, end_checksum, nearest_sizes, stored_sizes
from diffusers_flax.data.decoding import decode_pair, place_image, place_mask, reduce_mask
from diffusers_flax.data.mixture import check_sets, columns_of_sets, distinct_names
from diffusers_flax.data.options import Reading, Transform, num_usable_cores
from diffusers_flax.data.reading import MIN_ROWS_FOR_BAD_FRACTION, StoredPairs
from diffusers_flax.data.shards import (
    LATENTS,
    MASK,
    REFERENCE,
    TIME_IDS,
    image_at,
    latents_metadata,
    list_row_groups,
    pair_at,
    read_row_group,
    shard_files,
    take_first_rows,
)
from diffusers_flax.generating.batches import run_ahead
from diffusers_flax.loading.files import save_whole
from diffusers_flax.messages import differences
from diffusers_flax.training.flags import chosen_sizes
from diffusers_flax.training.models import (
    check_resolution,
    encode_images,
    is_sdxl,
    load_vae,
    mixed_precision_dtype,
    tree_checksum,
)
from diffusers_flax.training.processes import all_processes

logger = logging.getLogger(__name__)

LATENT_COLUMNS = ("original_image", "edited_image", "edit_prompt", TIME_IDS)
ENCODED_IMAGES = ("original_image", "edited_image", REFERENCE)  # columns of latents
PIXELS_PER_BATCH = 8 * 256 * 256  # of original images, per device


def encoder_on(devices, vae, params):
    """Compile a program that encodes pairs and their mirror images.

    Returns:
        (originals, edited), or (originals, edited, references), uint8 (B, H, W, 3) each -> a list
        of as many float16 arrays on the devices: modes of original and reference images
        (B, 2, h, w, C); means and standard deviations of the edited images (B, 2, h, w, 2 C).
        Index 1 of axis 1 is the mirror image. B is a multiple of the number of devices.
    """
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    replicated, sharded = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("batch",)))
    params = jax.tree.map(lambda x: np.asarray(x, vae.dtype), params)
    params = jax.device_put(params, replicated)

    def encode_pairs(params, image_sets):
        images = jnp.concatenate(image_sets)
        posterior = encode_images(vae, params, jnp.concatenate((images, images[:, :, ::-1])))
        mean, std = (
            jnp.stack(jnp.split(x, 2), axis=1).astype(jnp.float16)  # (images, 2, h, w, C)
            for x in (posterior.mean, posterior.std)
        )
        latents, stds = (jnp.split(x, len(image_sets)) for x in (mean, std))
        latents[1] = jnp.concatenate((latents[1], stds[1]), -1)
        return latents

    # shard_map, because XLA cannot partition encode_images' loop over images on CPUs.
    program = jax.jit(
        jax.shard_map(
            encode_pairs,
            mesh=mesh,
            in_specs=(replicated.spec, sharded.spec),
            out_specs=sharded.spec,
            check_vma=False,
        )
    )
    return lambda *images: program(params, jax.device_put(images, sharded))


@contextlib.contextmanager
def storing_without(part, place):
    """A context that logs a ValueError; the pair is stored without the part that it decodes."""
    try:
        yield
    except ValueError as error:
        logger.warning("%s: %s; stored without %s", place, error, part)


def decode_row(position, original, edited, *references, cells, resample, factor):
    """Decode a pair into images (H, W, 3); an undecodable pair is stored without latents.

    Returns:
        What is stored besides the latents, a dict; it has TIME_IDS if the pair is decodable. A bad
        mask or reference is stored as b"", and training that reads it replaces the pair.
    """
    row, group = {}, cells.group
    place = f"{group.path.name} row {group.first_row + position}"
    with storing_without("latents", place):
        of_pair = group._replace(mask_column="", reference_column="")
        pair = pair_at(cells._replace(group=of_pair), position)
        row["edit_prompt"] = pair.instruction
        time_ids = decode_pair(pair, (original, edited), resample, 0.5, False)
        row[TIME_IDS] = time_ids.tobytes()
    if TIME_IDS in row and group.mask_column:
        row[MASK], mask = b"", np.empty(original.shape[:2], np.uint8)
        with storing_without("its mask", place):
            pair = pair._replace(mask=image_at(cells, group.mask_column, position))
            place_mask(pair, mask, time_ids, resample, 0.5, False)
            row[MASK] = reduce_mask(mask, factor).tobytes()
    if TIME_IDS in row and group.reference_column:
        row[REFERENCE] = b""
        with storing_without("its reference image", place):
            data = image_at(cells, group.reference_column, position)
            if data is None:
                row[REFERENCE] = None
            else:
                place_image(data, references[0], resample, 0.5, False, "reference_image")
                del row[REFERENCE]  # its latents are stored
    return row


def write_shard(path, groups, metadata, config, encode, batch_size, count):
    """Encode a shard; a batch is decoded while the devices encode the previous one.

    Args:
        path, groups, metadata: of missing_shards.
        config: flags of the program.
        encode: of encoder_on.
        batch_size: pairs per call of encode.
        count: of write_latents.
    """
    prompt_type = groups[0].metadata.schema.to_arrow_schema().field(groups[0].columns[2]).type
    text = pa.list_(pa.string()) if "list" in str(prompt_type) else pa.string()
    stored = metadata.get("sizes")  # (height, width) each
    sizes = stored or [(config.resolution,) * 2]
    optional = {MASK: groups[0].mask_column, REFERENCE: groups[0].reference_column, SIZE: stored}
    names = (*LATENT_COLUMNS, *(name for name in optional if optional[name]))
    types = dict.fromkeys(names, pa.binary()) | {"edit_prompt": text, SIZE: pa.int16()}
    schema = pa.schema([(name, types[name]) for name in names], {LATENTS: json.dumps(metadata)})
    factor = sizes[0][0] // np.ravel(metadata["shape"])[0]
    size_of = np.zeros(sum(group.num_rows for group in groups), int)
    if len(sizes) > 1:
        size_of = nearest_sizes(stored_sizes(groups, 1), [size[::-1] for size in sizes])

    def decoded_batches(threads):
        for group in groups:
            options = dict(resample=config.image_interpolation_mode, factor=factor)
            decode = partial(decode_row, cells=read_row_group(group), **options)
            of_group = size_of[group.first_row : group.first_row + group.num_rows]
            for number, size in enumerate(sizes):
                of_size = np.flatnonzero(of_group == number).tolist()
                for start in range(0, len(of_size), batch_size):
                    positions = of_size[start : start + batch_size]
                    num_images = 3 if group.reference_column else 2
                    pixels = np.zeros((num_images, batch_size, *size, 3), np.uint8)
                    decoded = list(threads.map(decode, positions, *pixels))
                    yield group, number, positions, decoded, pixels

    def save(unfinished):
        rows = {}  # of the row group, by position
        pool = ThreadPoolExecutor(config.dataloader_num_workers or num_usable_cores())
        with pq.ParquetWriter(unfinished, schema, compression="none") as writer, pool:
            batches = run_ahead(
                decoded_batches(pool), lambda batch: encode(*batch[-1]), lambda _, arrays: arrays
            )
            for (group, number, positions, decoded, _), arrays, _ in batches:
                for position, row, *latents in zip(positions, decoded, *map(np.asarray, arrays)):
                    if TIME_IDS in row:
                        row = dict(zip(ENCODED_IMAGES, (x.tobytes() for x in latents))) | row
                    rows[position] = row | {SIZE: number}
                count(decoded)
                if len(rows) == group.num_rows:
                    table = pa.Table.from_pylist([rows[i] for i in sorted(rows)], schema)
                    writer.write_table(table, row_group_size=len(rows))
                    rows.clear()

    save_whole(path, save, shared=True)


def latent_dirs(train_data_dirs, output_dir):
    """The directory of each set's latents: output_dir; for several sets, its subdirectories."""
    if len(train_data_dirs) == 1:
        return [output_dir]
    return [str(Path(output_dir, name)) for name in distinct_names(train_data_dirs)]


def open_images(config, train_data_dir, columns, output_dir, overwrite):
    """Open a directory of images, after a check of the directory for its latents.

    Latents in output_dir keep their sizes if --aspect_ratio_buckets names them all. Otherwise sizes
    with less than a batch of pairs are left out, as in training.

    Returns:
        (row groups of the shards to encode, widths and heights of the latents); None for the
        second without --aspect_ratio_buckets.
    """
    if output_dir.resolve() == Path(train_data_dir).resolve():
        raise ValueError(f"{output_dir} is --train_data_dir; name another directory for latents")
    check_writable(f"the directory {output_dir}", output_dir)
    groups = list_row_groups(train_data_dir, columns)
    if latents_metadata(groups[0].metadata) is not None:
        raise ValueError(
            f"--train_data_dir {train_data_dir} already has latents; train on it directly"
        )
    existing = shard_files(output_dir)
    if others := {path.name for path in existing} - {group.path.name for group in groups}:
        raise ValueError(
            f"{output_dir}/{min(others)} matches no shard in {train_data_dir}; name another "
            "directory, or remove it"
        )
    if config.max_train_samples is not None:
        selected = {group.path for group in take_first_rows(groups, config.max_train_samples)}
        groups = [group for group in groups if group.path in selected]
    if (sizes := chosen_sizes(config)) is None:
        return groups, None
    transform = Transform(config.resolution, sizes, random_crop=False)
    reading = Reading(config.max_train_samples, num_threads=config.dataloader_num_workers)
    pairs = StoredPairs(train_data_dir, columns, transform, all_processes(), reading)
    # All processes count together, also those whose latents have their sizes.
    pairs.choose_sizes(max(1, config.train_batch_size // jax.process_count()))
    if existing and not overwrite:
        stored = {(w, h) for h, w in stored_settings(existing[0]).get("sizes", ())}
        if stored and stored <= {*sizes}:
            return groups, tuple(size for size in sizes if size in stored)
    return groups, pairs.sizes


def missing_shards(config, groups, sizes, output_dir, vae, checksum, overwrite):
    """The shards of latents that output_dir lacks, [(path, its row groups, its metadata)].

    Args:
        config, output_dir, overwrite: as for write_latents.
        groups, sizes: of open_images.
        vae, checksum: module and tree_checksum of its parameters.

    Raises:
        ValueError: a shard was made with other settings.
    """
    factor = 2 ** (len(vae.block_out_channels) - 1)
    settings = {
        "vae": f"{checksum:08x}",
        "mixed_precision": "bf16" if vae.dtype == jnp.bfloat16 else "no",  # of the VAE
        "resolution": config.resolution,
        "image_interpolation_mode": config.image_interpolation_mode,
    }
    if sizes:
        settings["sizes"] = [[height, width] for width, height in sizes]
    sides = settings.get("sizes", [[config.resolution] * 2])
    shapes = [[h // factor, w // factor, vae.latent_channels] for h, w in sides]
    settings["shape"] = shapes if sizes else shapes[0]
    missing = []
    for path, shard_groups in groupby(groups, lambda group: group.path):
        shard_groups = list(shard_groups)
        latent_path, first = output_dir / path.name, shard_groups[0]
        metadata = settings | {
            "source_bytes": path.stat().st_size,
            "source_end": end_checksum(path),
            "rows": first.metadata.num_rows,
            "columns": list(first.columns),
        }
        if first.mask_column:  # latents with masks also serve runs that read none
            metadata["mask_column"] = first.mask_column
        if first.reference_column:  # likewise
            metadata["reference_column"] = first.reference_column
        stored = stored_settings(latent_path) if latent_path.exists() else {}
        different = differences(stored, metadata)
        if stored and different and not overwrite:
            raise ValueError(
                f"{latent_path} was made with other settings ({'; '.join(different)}); name "
                "another directory, or replace it: cache_latents.py --overwrite_output_dir"
            )
        if different:
            missing.append((latent_path, shard_groups, metadata))
    return missing


def stored_settings(path):
    """The metadata of a shard of latents; a ValueError for other shards, which stay."""
    settings = latents_metadata(pq.read_metadata(path))
    if settings is None:
        raise ValueError(f"{path} has no latents; name a directory that has only latents")
    return settings


def write_latents(config, output_dir, columns, batch_size=None, overwrite=False):
    """Write all missing shards of latents.

    Args:
        config: flags of cache_latents.py or of the trainer.
        output_dir: directory of the shards, see latent_dirs.
        columns: Columns, with masks and reference images if these are also stored.
        batch_size: pairs per device; None: PIXELS_PER_BATCH pixels of original images.
        overwrite: replace shards of latents that were made with other settings.

    Raises:
        ValueError: invalid flags, data or VAE, or output_dir contains other files.
    """
    sources = config.train_data_dir
    check_sets(sources, sizes=chosen_sizes(config))
    folders = [Path(folder) for folder in latent_dirs(sources, output_dir)]
    sets = [  # before the VAE is loaded
        (*open_images(config, source, of_source, folder, overwrite), folder)
        for source, of_source, folder in zip(sources, columns_of_sets(sources, columns), folders)
    ]
    vae, params = load_vae(config, mixed_precision_dtype(config), is_sdxl(config))
    check_resolution(config, 2 ** (len(vae.block_out_channels) - 1))
    checksum, missing = tree_checksum(params), []
    for one_set in sets:
        missing += missing_shards(config, *one_set, vae, checksum, overwrite)
    if not missing:
        return
    for path, _, _ in missing:
        path.unlink(missing_ok=True)
    devices = jax.local_devices()
    sizes_of_groups = [[group.num_rows for group in groups] for _, groups, _ in missing]
    per_device = batch_size or max(1, PIXELS_PER_BATCH // config.resolution**2)
    largest_group = math.ceil(max(map(max, sizes_of_groups)) / len(devices))
    batch_size = min(per_device, largest_group) * len(devices)
    # Processes that share output_dir start at different shards and skip existing ones.
    first = jax.process_index() * len(missing) // jax.process_count()
    encode, num_bad = encoder_on(devices, vae, params), 0

    def count(rows):
        """Count the rows of a batch, see decode_row; raise a ValueError if too many are bad."""
        nonlocal num_bad
        bar.update(len(rows))
        num_bad += sum(TIME_IDS not in row for row in rows)
        if num_bad > config.max_bad_fraction * max(bar.n, MIN_ROWS_FOR_BAD_FRACTION):
            raise ValueError(
                f"{num_bad} of the first {bar.n} pairs of {', '.join(sources)} cannot be used, "
                f"more than --max_bad_fraction {config.max_bad_fraction} allows"
            )

    with tqdm(total=sum(map(sum, sizes_of_groups)), desc="encoding", unit="pair") as bar:
        for path, groups, metadata in missing[first:] + missing[:first]:
            if path.exists():
                bar.update(sum(group.num_rows for group in groups))
            else:
                write_shard(path, groups, metadata, config, encode, batch_size, count)
