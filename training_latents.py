"""The VAE's latents of every pair in a dataset, in parquet shards: writing and checking them.

cache_latents.py and the trainer's --cache_latents call write_latents().
"""

import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
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

from images import num_usable_cores
from modeling_flax_vae import FlaxAutoencoderKL
from parquet_dataset import MIN_ROWS_TO_JUDGE
from parquet_shards import (
    LATENTS,
    RowGroup,
    decode_pair,
    first_rows_of,
    latents_of,
    list_row_groups,
    pair_at,
    read_row_group,
)
from training_checkpoints import tree_checksum
from training_models import encode_images

logger = logging.getLogger(__name__)

COLUMNS = ("original_image", "edited_image", "edit_prompt")
PIXELS_AT_ONCE = 8 * 256 * 256  # of the pairs that a device encodes at once
UNFINISHED = ".unfinished-"  # what the folders are called in which shards are being written
LEFT_SECONDS = 24 * 3600  # without a batch until such a folder counts as a killed process's
SOURCE_BYTES_READ = 1 << 16  # of the end of a shard, where its footer is


def encode_pairs(vae, params, originals, edits):
    """Latents of pairs and of their mirror images.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        originals, edits: uint8 (B, R, R, 3).

    Returns:
        float16 (B, 2, h, w, C), the modes of the originals, and (B, 2, h, w, 2 C), mean and
        standard deviation of the edits; the second of two is of the picture mirrored.
    """
    B = len(originals)
    pictures = jnp.concatenate((originals, edits))
    posterior = encode_images(vae, params, jnp.concatenate((pictures, pictures[:, :, ::-1])))
    mean, std = (
        jnp.stack(jnp.split(x, 2), axis=1).astype(jnp.float16)  # (2 B, 2, h, w, C)
        for x in (posterior.mean, posterior.std)
    )
    return mean[:B], jnp.concatenate((mean[B:], std[B:]), -1)


def vae_checksum(params):
    """What tells a VAE's float32 parameters from those of others, hexadecimal."""
    return f"{tree_checksum(params):08x}"


def check_kept(path: Path, what: dict) -> None:
    """Raise a ValueError if a shard of latents is not what it should be."""
    try:
        kept = latents_of(pq.read_metadata(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it") from error
    if kept is None:
        raise ValueError(
            f"{path} holds no latents; name a folder of its own for them, not that of the data"
        )
    if changes := [
        f"{name} was {kept.get(name)} and is {value}"
        for name, value in what.items()
        if kept.get(name) != value
    ]:
        raise ValueError(f"{path} was made otherwise ({'; '.join(changes)}); name another folder")


def describe_source(path: Path, groups: list[RowGroup]) -> dict:
    """What tells a shard of pictures from others: its size, end, rows and columns."""
    with path.open("rb") as file:
        file.seek(-min(SOURCE_BYTES_READ, path.stat().st_size), os.SEEK_END)
        end = zlib.crc32(file.read())
    return {
        "source_bytes": path.stat().st_size,
        "source_end": f"{end:08x}",
        "rows": groups[0].metadata.num_rows,
        "columns": list(groups[0].columns),
    }


def shards_of(groups: list[RowGroup]) -> Iterator[tuple[Path, list[RowGroup]]]:
    """Row groups, which are in the order of shards, by shard."""
    for path, of_shard in groupby(groups, key=lambda group: group.path):
        yield path, list(of_shard)


def write_shard(path, groups, encode, what, batch_size, config, bar, bad):
    """Encode a shard, row group by row group; it appears under its name when it is complete.

    Args:
        path: of the file to write.
        groups: the shard's row groups.
        encode: two uint8 (B, R, R, 3) -> arrays as of encode_pairs, maybe still on their way.
        what: to be kept in the file.
        batch_size: pairs that go to encode at once.
        config: Config.
        bar: tqdm that counts pairs.
        bad: list to which pairs that cannot be decoded are added.

    Raises:
        ValueError: there are more of those than config.max_bad_fraction allows.
    """
    kinds = pa.binary(), pa.binary(), pa.string()
    schema = pa.schema(zip(COLUMNS, kinds), {LATENTS: json.dumps(what)})
    R = config.resolution

    def decode(group, cells, position, out):
        """The instruction, and why the pair is broken, or None; its pixels go to out."""
        prompt = None
        try:
            pair = pair_at(cells, position)
            prompt = pair.prompt
            decode_pair(pair, out, group.columns, config.image_interpolation_mode, 0.5, False)
        except ValueError as error:
            return prompt, f"{path.name} row {group.first_row + position}: {error}"
        return prompt, None

    def finish(encoded, decoded):
        """Cells of a batch that was encoded meanwhile."""
        originals, edits = (np.asarray(x) for x in encoded)
        bar.update(len(decoded))
        for _, reason in decoded:
            if reason:
                logger.warning("%s; it gets no latents", reason)
                bad.append(reason)
        if len(bad) > config.max_bad_fraction * max(bar.n, MIN_ROWS_TO_JUDGE):
            raise ValueError(
                f"{len(bad)} of the first {bar.n} pairs of {config.train_data_dir} cannot be "
                f"decoded, more than max_bad_fraction={config.max_bad_fraction} allows; for one "
                f"{bad[-1]}"
            )
        return [
            (None, None, prompt) if reason else (original.tobytes(), edited.tobytes(), prompt)
            for original, edited, (prompt, reason) in zip(originals, edits, decoded)
        ]

    threads = ThreadPoolExecutor(config.dataloader_num_workers or num_usable_cores())
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        unfinished = Path(folder, path.name)
        with pq.ParquetWriter(unfinished, schema, compression="none") as writer, threads:
            for group in groups:
                cells, rows, waiting = read_row_group(group), [], None
                for start in range(0, group.num_rows, batch_size):
                    positions = range(start, min(start + batch_size, group.num_rows))
                    pixels = np.zeros((2, batch_size, R, R, 3), np.uint8)
                    decoded = [
                        threads.submit(decode, group, cells, position, tuple(pixels[:, i]))
                        for i, position in enumerate(positions)
                    ]
                    decoded = [future.result() for future in decoded]
                    if waiting:  # the devices were at work while the next pictures were decoded
                        rows += finish(*waiting)
                    waiting = encode(*pixels), decoded
                    with contextlib.suppress(OSError):  # not every file system can
                        os.utime(folder)  # tells remove_leftovers that this process is at work
                rows += finish(*waiting)
                columns = [pa.array(column, kind) for column, kind in zip(zip(*rows), kinds)]
                writer.write_table(pa.table(columns, schema), row_group_size=len(rows))
        unfinished.replace(path)


def remove_leftovers(output_dir):
    """Remove the folders of killed processes; one touched within a day may be at work."""
    for folder in output_dir.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):  # it was finished meanwhile, or is somebody else's
            if time.time() - folder.stat().st_mtime > LEFT_SECONDS:
                shutil.rmtree(folder)


def write_latents(config, output_dir, batch_size=None):
    """Write all shards of latents that are missing.

    Args:
        config: the Config of cache_latents.py, or the trainer's.
        output_dir: directory of the shards.
        batch_size: pairs at once on each device; None: as many as have 8 images of 256 pixels.

    Raises:
        ValueError: data or VAE cannot be used, or the directory contains something else.
    """
    positive = {name: getattr(config, name) for name in ("resolution", "max_train_samples")}
    for name, value in (positive | {"batch_size": batch_size}).items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if config.dataloader_num_workers < 0:
        raise ValueError(
            f"--dataloader_num_workers {config.dataloader_num_workers} must be at least 0"
        )
    if not 0 <= config.max_bad_fraction <= 1:
        raise ValueError(f"--max_bad_fraction {config.max_bad_fraction} must be from 0 to 1")
    output_dir = Path(output_dir)
    if output_dir.resolve() == Path(config.train_data_dir).resolve():
        raise ValueError(f"{output_dir} is the folder of the data; name another for the latents")
    groups = list_row_groups(
        config.train_data_dir,
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
    )
    if latents_of(groups[0].metadata) is not None:
        raise ValueError(f"{config.train_data_dir} holds latents already; train on it as it is")
    dtype = jnp.bfloat16 if config.mixed_precision == "bf16" else jnp.float32
    vae, params = FlaxAutoencoderKL.from_pretrained(
        config.pretrained_model_name_or_path,
        subfolder="vae",
        revision=config.revision,
        variant=config.variant,
        dtype=dtype,
    )
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    factor = 2 ** (len(vae.block_out_channels) - 1)
    if config.resolution % factor:
        raise ValueError(f"--resolution {config.resolution} must be a multiple of {factor}")
    side = config.resolution // factor
    made_with = {
        "vae": vae_checksum(params),
        "mixed_precision": config.mixed_precision,
        "resolution": config.resolution,
        "image_interpolation_mode": config.image_interpolation_mode,
        "shape": [side, side, vae.latent_channels],
    }
    names = {group.path.name for group in groups}
    for stranger in sorted(output_dir.glob("*.parquet")):
        if stranger.name not in names:
            raise ValueError(
                f"{stranger} is of no shard in {config.train_data_dir}; name another folder"
            )
    if config.max_train_samples is not None:
        wanted = {group.path for group in first_rows_of(groups, config.max_train_samples)}
        groups = [group for group in groups if group.path in wanted]
    missing = []
    for path, of_shard in shards_of(groups):
        kept = output_dir / path.name
        what = made_with | describe_source(path, of_shard)
        if kept.exists():
            check_kept(kept, what)
        else:
            missing.append((kept, of_shard, what))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{output_dir} cannot be a folder of latents ({error}); name another"
        ) from error
    remove_leftovers(output_dir)
    if not missing:
        return
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("batch",))
    whole, shares = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("batch",)))
    params = jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), params), whole)
    # Every device its own pairs, which XLA would not see in a loop over pictures.
    program = jax.jit(
        jax.shard_map(
            partial(encode_pairs, vae),
            mesh=mesh,
            in_specs=(whole.spec, shares.spec, shares.spec),
            out_specs=shares.spec,
            check_vma=False,
        )
    )

    def encode(originals, edits):
        return program(params, *jax.device_put((originals, edits), shares))

    per_device = batch_size or max(1, PIXELS_AT_ONCE // config.resolution**2)
    most = max(group.num_rows for _, of_shard, _ in missing for group in of_shard)
    batch_size = min(per_device, math.ceil(most / mesh.size)) * mesh.size
    # Processes that share the folder begin at different shards, and find what others have done.
    first = jax.process_index() * len(missing) // jax.process_count()
    missing, bad = missing[first:] + missing[:first], []
    num_pairs = sum(group.num_rows for _, of_shard, _ in missing for group in of_shard)
    with tqdm(total=num_pairs, desc="encoding", unit="pair") as bar:
        for path, of_shard, what in missing:
            if path.exists():
                bar.update(sum(group.num_rows for group in of_shard))
            else:
                write_shard(path, of_shard, encode, what, batch_size, config, bar, bad)


def check_vae(dataset, vae_params, source):
    """Raise a ValueError if a dataset's latents, if it has any, are of another VAE.

    Args:
        dataset: ParquetImagePairs.
        vae_params: NumPy arrays, float32.
        source: where the VAE is from, for the error.
    """
    if dataset.latents and dataset.latents["vae"] != vae_checksum(vae_params):
        raise ValueError(
            f"{dataset.train_data_dir} has latents of another VAE than that of {source}; make new "
            "ones in another directory"
        )
