"""Cache the VAE's latents of a dataset on disk, for cache_latents.py and --cache_latents."""

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from diffusers_flax.command_line import check_writable
from diffusers_flax.data.buckets import SIZE, check_sides, end_checksum, nearest_sizes, stored_sizes
from diffusers_flax.data.decoding import (
    DAMAGED_MASK,
    decode_pair,
    place_mask,
    reduce_mask,
)
from diffusers_flax.data.mixture import check_sets, columns_of_sets, distinct_names
from diffusers_flax.data.options import Reading, Transform, num_usable_cores
from diffusers_flax.data.reading import MIN_ROWS_FOR_BAD_FRACTION, StoredPairs
from diffusers_flax.data.shards import (
    LATENTS,
    MASK,
    TIME_IDS,
    is_list_of_text,
    latents_metadata,
    list_row_groups,
    pair_at,
    read_row_group,
    shard_files,
    take_first_rows,
)
from diffusers_flax.loading.files import save_whole
from diffusers_flax.messages import differences
from diffusers_flax.training.flags import chosen_sizes, nearest_multiples
from diffusers_flax.training.models import (
    encode_images,
    is_sdxl,
    load_vae,
    mixed_precision_dtype,
    tree_checksum,
)
from diffusers_flax.training.processes import all_processes

logger = logging.getLogger(__name__)

LATENT_COLUMNS = ("original_image", "edited_image", "edit_prompt", TIME_IDS)
PIXELS_PER_BATCH = 8 * 256 * 256  # of original images, per device


def encode_pairs(vae, params, originals, edited):
    """Encode pairs and their mirror images.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        originals, edited: uint8 (B, H, W, 3).

    Returns:
        (modes, moments), float16: modes of the original images (B, 2, h, w, C); means and standard
        deviations of the edited images (B, 2, h, w, 2 C). Index 1 of axis 1 is the mirror image.
    """
    B = len(originals)
    images = jnp.concatenate((originals, edited))
    posterior = encode_images(vae, params, jnp.concatenate((images, images[:, :, ::-1])))
    mean, std = (
        jnp.stack(jnp.split(x, 2), axis=1).astype(jnp.float16)  # (2 B, 2, h, w, C)
        for x in (posterior.mean, posterior.std)
    )
    return mean[:B], jnp.concatenate((mean[B:], std[B:]), -1)


def vae_checksum(params):
    """A hexadecimal checksum of a VAE's float32 parameters."""
    return f"{tree_checksum(params):08x}"


def decode_into(out, group, cells, position, resample, factor):
    """Decode a pair; the row of an undecodable pair is stored without latents.

    Args:
        out: the two images to write, uint8 (H, W, 3) each.
        group: row group.
        cells: of read_row_group.
        position: row of the group.
        resample: --image_interpolation_mode.
        factor: pixels per latent along a side.

    Returns:
        (prompt, time_ids, mask, error). prompt: one or several instructions. time_ids: bytes; None
        for an undecodable pair. mask: bytes at the latents' size, None, or DAMAGED_MASK. error:
        message or None.
    """
    prompt, name = None, f"{group.path.name} row {group.first_row + position}"
    try:
        pair = pair_at(cells._replace(masks=None), position)
        prompt = pair.instruction
        time_ids = decode_pair(pair, out, group.columns, resample, 0.5, False)
    except ValueError as error:
        return prompt, None, None, f"{name}: {error}"
    stored, mask = time_ids.tobytes(), None
    if group.mask_column:  # separately, as runs that read no masks use the pair anyway
        pixels = np.empty(out[0].shape[:2], np.uint8)
        try:
            pair = pair._replace(mask=cells.masks[position])
            place_mask(pair, pixels, tuple(time_ids[0, 1::-1]), resample, 0.5, False)
        except ValueError as error:
            return prompt, stored, DAMAGED_MASK, f"{name}: {error}"
        mask = reduce_mask(pixels, factor).tobytes()
    return prompt, stored, mask, None


def encode_group(group, size_of, sizes, encode, batch_size, config, threads, factor):
    """Encode a row group; a batch is decoded while the devices encode the previous one.

    Args:
        group: row group of images.
        size_of: index of each row's size.
        sizes: widths and heights.
        encode, batch_size, config: as for write_latent_shard.
        threads: executor that decodes.
        factor: pixels per latent along a side.

    Yields:
        (positions, encode's result, decode_into's results) of a batch, whose pairs have one size.
    """
    cells, in_flight = read_row_group(group), None
    of_sizes = [np.flatnonzero(size_of == size).tolist() for size in range(len(sizes))]
    batches = [
        (size, of_size[start : start + batch_size])
        for size, of_size in zip(sizes, of_sizes)
        for start in range(0, len(of_size), batch_size)
    ]
    for (width, height), positions in batches:
        pixels = np.zeros((2, batch_size, height, width, 3), np.uint8)
        decode = partial(
            decode_into,
            group=group,
            cells=cells,
            resample=config.image_interpolation_mode,
            factor=factor,
        )
        decoded = [
            threads.submit(decode, tuple(pixels[:, i]), position=position)
            for i, position in enumerate(positions)
        ]
        decoded = [future.result() for future in decoded]
        if in_flight:
            yield in_flight
        in_flight = positions, encode(*pixels), decoded
    yield in_flight


def latent_rows(encoded, decoded, config, bar, bad):
    """Wait for a batch of encode_group; return its rows, dicts of LATENT_COLUMNS and MASK.

    Args:
        encoded, decoded: of encode_group.
        config, bar, bad: as for write_latent_shard.

    Raises:
        ValueError: more pairs are undecodable than config.max_bad_fraction allows.
    """
    originals, edited_images = (np.asarray(x) for x in encoded)
    bar.update(len(decoded))
    for _, time_ids, _, reason in decoded:
        if reason:
            lost = "latents" if time_ids is None else "its mask"
            logger.warning("%s; stored without %s", reason, lost)
            bad.append(reason)
    if len(bad) > config.max_bad_fraction * max(bar.n, MIN_ROWS_FOR_BAD_FRACTION):
        raise ValueError(
            f"{len(bad)} of the first {bar.n} pairs of {', '.join(config.train_data_dir)} "
            f"cannot be used, more than --max_bad_fraction {config.max_bad_fraction} allows; "
            f"for example {bad[-1]}"
        )
    rows = []
    for original, edited, (prompt, time_ids, mask, _) in zip(originals, edited_images, decoded):
        values = (original.tobytes(), edited.tobytes(), prompt, time_ids, mask)
        if time_ids is None:
            values = (None, None, prompt, None, None)
        rows.append(dict(zip((*LATENT_COLUMNS, MASK), values)))
    return rows


def write_latent_shard(path, groups, encode, metadata, batch_size, config, bar, bad):
    """Encode a shard, one row group at a time.

    Args:
        path: file to write.
        groups: the row groups of the shard of images.
        encode: (originals, edited), uint8 (B, H, W, 3) each -> encode_pairs' result on the devices.
        metadata: dict to store in the file.
        batch_size: pairs per call of encode.
        config: flags of the program.
        bar: tqdm bar that counts pairs.
        bad: list of error messages; those of undecodable pairs are appended.

    Raises:
        ValueError: more pairs are undecodable than config.max_bad_fraction allows.
    """
    prompt_type = groups[0].metadata.schema.to_arrow_schema().field(groups[0].columns[2]).type
    text = pa.list_(pa.string()) if is_list_of_text(prompt_type) else pa.string()
    sizes, shapes = metadata.get("sizes"), metadata["shape"]
    names = (*LATENT_COLUMNS, *[MASK] * bool(groups[0].mask_column), *[SIZE] * bool(sizes))
    images = dict.fromkeys(("original_image", "edited_image", TIME_IDS, MASK), pa.binary())
    types = images | {"edit_prompt": text, SIZE: pa.int16()}
    schema = pa.schema([(name, types[name]) for name in names], {LATENTS: json.dumps(metadata)})
    if sizes:
        sizes = [(width, height) for height, width in sizes]
    else:
        sizes, shapes = [(config.resolution,) * 2], [shapes]
    factor = sizes[0][1] // shapes[0][0]
    size_of = np.zeros(sum(group.num_rows for group in groups), int)
    if len(sizes) > 1:
        size_of = nearest_sizes(stored_sizes(groups, 1), sizes)
    threads = ThreadPoolExecutor(config.dataloader_num_workers or num_usable_cores())

    def save(unfinished):
        with pq.ParquetWriter(unfinished, schema, compression="none") as writer, threads:
            for group in groups:
                of_group = size_of[group.first_row : group.first_row + group.num_rows]
                rows = [None] * group.num_rows
                for positions, *batch in encode_group(
                    group, of_group, sizes, encode, batch_size, config, threads, factor
                ):
                    for position, row in zip(positions, latent_rows(*batch, config, bar, bad)):
                        rows[position] = row | {SIZE: int(of_group[position])}
                writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=len(rows))

    save_whole(path, save, shared=True)


def describe_source(path, groups):
    """Identify a shard of images by its size, end, rows and columns."""
    source = {
        "source_bytes": path.stat().st_size,
        "source_end": end_checksum(path),
        "rows": groups[0].metadata.num_rows,
        "columns": list(groups[0].columns),
    }
    mask_column = groups[0].mask_column  # latents with masks also serve runs that read none
    return source | ({"mask_column": mask_column} if mask_column else {})


def latent_dirs(train_data_dirs, output_dir):
    """The directory of each set's latents: output_dir; for several sets, its subdirectories."""
    if len(train_data_dirs) == 1:
        return [output_dir]
    return [str(Path(output_dir, name)) for name in distinct_names(train_data_dirs)]


def check_latent_dirs(config, output_dirs):
    """Raise a ValueError for a directory that cannot be written; output_dirs: of latent_dirs."""
    sources = [Path(directory).resolve() for directory in config.train_data_dir]
    flag = "cache_latents" if hasattr(config, "cache_latents") else "output_dir"
    for output_dir in map(Path, output_dirs):
        if output_dir.resolve() in sources:
            raise ValueError(
                f"{output_dir} is --train_data_dir; name another directory for the latents"
            )
        check_writable(f"--{flag} {output_dir}", output_dir)


def list_images(train_data_dir, columns, output_dir, max_train_samples):
    """List the row groups of a directory of images, after a check of output_dir.

    Args:
        train_data_dir: directory of shards of images.
        columns: Columns.
        output_dir: Path of the directory of their shards of latents.
        max_train_samples: list the shards with the first N rows only; None: all.

    Raises:
        ValueError: train_data_dir has latents, or output_dir has shards with other names.
    """
    groups = list_row_groups(train_data_dir, columns)
    if latents_metadata(groups[0].metadata) is not None:
        raise ValueError(
            f"--train_data_dir {train_data_dir} already has latents; train on it directly"
        )
    names = {group.path.name for group in groups}
    for path in shard_files(output_dir):
        if path.name not in names:
            raise ValueError(
                f"{path} matches no shard in {train_data_dir}; name another directory, or remove it"
            )
    if max_train_samples is None:
        return groups
    selected = {group.path for group in take_first_rows(groups, max_train_samples)}
    return [group for group in groups if group.path in selected]


def choose_latent_sizes(config, train_data_dir, columns, output_dir, overwrite):
    """The widths and heights of a directory's latents; None without --aspect_ratio_buckets.

    Latents in output_dir keep their sizes if the flag names them all. Otherwise sizes with less
    than a batch of pairs are left out, as in training.

    Args:
        config, overwrite: as for write_latents.
        train_data_dir, columns, output_dir: as for list_images.
    """
    sizes = chosen_sizes(config)
    if sizes is None:
        return None
    pairs = StoredPairs(
        train_data_dir,
        columns,
        Transform(config.resolution, sizes, random_crop=False),
        all_processes(),
        Reading(max_rows=config.max_train_samples, num_threads=config.dataloader_num_workers),
    )
    pairs.choose_sizes(max(1, config.train_batch_size // jax.process_count()))
    for path in [] if overwrite else shard_files(output_dir)[:1]:
        stored = stored_settings(path).get("sizes", ())
        stored = tuple((width, height) for height, width in stored)
        if stored and {*stored} <= {*sizes}:
            return stored
    return pairs.decoding.sizes


def latent_settings(config, vae, params, sizes):
    """The settings of latents, for the metadata of their shards.

    Args:
        config: as for write_latents.
        vae, params: FlaxAutoencoderKL and its float32 parameters.
        sizes: of choose_latent_sizes.

    Raises:
        ValueError: the VAE does not divide the resolution or a size.
    """
    factor = 2 ** (len(vae.block_out_channels) - 1)
    if config.resolution % factor:
        raise ValueError(
            f"--resolution {config.resolution} is not a multiple of {factor}; try "
            f"{nearest_multiples(config.resolution, factor)}"
        )
    for size in sizes or ():
        check_sides(size, factor)
    C = vae.latent_channels
    shapes = [
        [height // factor, width // factor, C]
        for width, height in sizes or [(config.resolution,) * 2]
    ]
    return {
        "vae": vae_checksum(params),
        "mixed_precision": "bf16" if vae.dtype == jnp.bfloat16 else "no",  # of the VAE
        "resolution": config.resolution,
        "image_interpolation_mode": config.image_interpolation_mode,
        **(
            {"sizes": [[height, width] for width, height in sizes], "shape": shapes}
            if sizes
            else {"shape": shapes[0]}
        ),
    }


def missing_shards(output_dir, groups, settings, overwrite):
    """Prepare output_dir; return the shards to write, [(path, its row groups, its metadata)].

    Args:
        output_dir: Path of the directory of the shards.
        groups: row groups of images, in the order of the shards.
        settings: of latent_settings.
        overwrite: as for write_latents.

    Raises:
        ValueError: a shard was made with other settings, and overwrite is False.
    """
    missing = []
    of_shards = {}
    for group in groups:
        of_shards.setdefault(group.path, []).append(group)
    for path, shard_groups in of_shards.items():
        latent_path = output_dir / path.name
        metadata = settings | describe_source(path, shard_groups)
        if latent_path.exists():
            different = differences(stored_settings(latent_path), metadata)
            if not different:
                continue
            if not overwrite:
                raise ValueError(
                    f"{latent_path} was made with other settings ({'; '.join(different)}); name "
                    "another directory, or replace it: cache_latents.py --overwrite_output_dir"
                )
        missing.append((latent_path, shard_groups, metadata))
    output_dir.mkdir(parents=True, exist_ok=True)
    for path, _, _ in missing:
        path.unlink(missing_ok=True)
    return missing


def stored_settings(path):
    """The metadata of a shard of latents.

    Raises:
        ValueError: the file is damaged, or has no latents.
    """
    try:
        settings = latents_metadata(pq.read_metadata(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); remove it, and it is written again"
        ) from error
    if settings is None:
        raise ValueError(f"{path} contains no latents; name a directory that holds only latents")
    return settings


def encoder_on(devices, vae, params):
    """Compile encode_pairs for devices: (originals, edited) -> latents on the devices.

    Args:
        devices: their number divides the number of pairs.
        vae, params: FlaxAutoencoderKL and its float32 parameters.
    """
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    replicated, sharded = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("batch",)))
    params = jax.tree.map(lambda x: np.asarray(x, vae.dtype), params)
    params = jax.device_put(params, replicated)
    # shard_map, because XLA cannot partition encode_images' loop over images on CPUs.
    program = jax.jit(
        jax.shard_map(
            partial(encode_pairs, vae),
            mesh=mesh,
            in_specs=(replicated.spec, sharded.spec, sharded.spec),
            out_specs=sharded.spec,
            check_vma=False,
        )
    )
    return lambda *images: program(params, *jax.device_put(images, sharded))


def write_latents(config, output_dir, columns, batch_size=None, overwrite=False):
    """Write all missing shards of latents.

    Args:
        config: flags of cache_latents.py or of the trainer.
        output_dir: directory of the shards, see latent_dirs.
        columns: Columns, with masks if these are also stored.
        batch_size: pairs per device; None: PIXELS_PER_BATCH pixels of original images.
        overwrite: replace shards of latents that were made with other settings.

    Raises:
        ValueError: invalid flags, data or VAE, or output_dir contains other files.
    """
    check_sets(config.train_data_dir, sizes=chosen_sizes(config))
    output_dirs = [Path(folder) for folder in latent_dirs(config.train_data_dir, output_dir)]
    check_latent_dirs(config, output_dirs)
    sets = zip(config.train_data_dir, columns_of_sets(config.train_data_dir, columns), output_dirs)
    sets = [  # before the VAE is loaded
        (
            paths[-1],
            list_images(*paths, config.max_train_samples),
            choose_latent_sizes(config, *paths, overwrite),
        )
        for paths in sets
    ]
    vae, params = load_vae(config, mixed_precision_dtype(config), is_sdxl(config))
    missing = [
        shard
        for output_dir, groups, sizes in sets
        for shard in missing_shards(
            output_dir, groups, latent_settings(config, vae, params, sizes), overwrite
        )
    ]
    if not missing:
        return
    devices = jax.local_devices()
    encode = encoder_on(devices, vae, params)
    per_device = batch_size or max(1, PIXELS_PER_BATCH // config.resolution**2)
    largest_group = max(group.num_rows for _, shard_groups, _ in missing for group in shard_groups)
    batch_size = min(per_device, math.ceil(largest_group / len(devices))) * len(devices)
    # Processes that share output_dir start at different shards and skip existing ones.
    first = jax.process_index() * len(missing) // jax.process_count()
    missing, bad = missing[first:] + missing[:first], []
    num_pairs = sum(group.num_rows for _, shard_groups, _ in missing for group in shard_groups)
    with tqdm(total=num_pairs, desc="encoding", unit="pair") as bar:
        for path, shard_groups, metadata in missing:
            if path.exists():
                bar.update(sum(group.num_rows for group in shard_groups))
            else:
                write_latent_shard(
                    path, shard_groups, encode, metadata, batch_size, config, bar, bad
                )


def check_vae(dataset, vae_params, config):
    """Raise a ValueError if another VAE made a dataset's cached latents.

    Args:
        dataset: ParquetImagePairs or Mixture, of latents or images.
        vae_params: float32 NumPy arrays.
        config: flags, which name the VAE in the error message.
    """
    if dataset.latents and dataset.latents["vae"] != vae_checksum(vae_params):
        source = config.pretrained_vae_model_name_or_path or config.pretrained_model_name_or_path
        raise ValueError(
            f"{dataset.train_data_dir} has latents of another VAE than {source}'s; name "
            "another --cache_latents directory to make new ones"
        )
