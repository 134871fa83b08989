"""The VAE's latents of every pair, computed once and kept, so that training need not compute them.

Encoding two pictures takes about as much work as the rest of a training step at 256 pixels, and
the VAE is frozen: the trainer makes such a folder by itself with --cache_latents DIR, and later
runs with the same flag find it. To make it beforehand, perhaps on another machine:

    python cache_latents.py --train_data_dir data --output_dir latents \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5

With the demo's model and data, two minutes on a CPU:

    python cache_latents.py --pretrained_model_name_or_path demo/base_model \\
        --train_data_dir demo/output/data --resolution 64 --output_dir /tmp/latents

Every shard becomes one of the same name, with the same rows: `original_image` holds the mode of the
picture's posterior, `edited_image` its mean and standard deviation, each of the picture as it is
and mirrored, float16; `edit_prompt` is copied. Pairs that cannot be decoded are named and have
nulls, and training replaces them as it would have. A pair takes 49 kB at 256 pixels. What is there
already is not made again, and what another VAE, size, precision or dataset left there is refused.
The square is cut from the middle. Latents are sampled from the posterior anew at every step, as
without the cache.

Needs what the VAE needs: a GPU, a TPU, or a CPU with patience (5 s a pair on two cores). Hosts with
shards of their own have a folder of their own each; hosts that share both share the work.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tqdm import tqdm

from attention_flax import by_platform
from checkpoints_flax import tree_checksum
from command_line import run_main
from modeling_flax_vae import FlaxAutoencoderKL
from parquet_images import num_usable_cores
from parquet_processing import (
    LATENTS,
    MIN_ROWS_TO_JUDGE,
    RowGroup,
    decode_pair,
    first_rows_of,
    latents_of,
    list_row_groups,
    pair_at,
    read_row_group,
)

logger = logging.getLogger(__name__)

COLUMNS = ("original_image", "edited_image", "edit_prompt")
PIXELS_AT_ONCE = 8 * 256 * 256  # of the pairs that a device encodes at once
UNFINISHED = ".unfinished-"  # what the folders are called in which shards are being written
LEFT_SECONDS = 24 * 3600  # without a batch until such a folder counts as a killed process's
SOURCE_BYTES_READ = 1 << 16  # of the end of a shard, where its footer is


@dataclass(frozen=True)
class Config:
    pretrained_model_name_or_path: str  # pipeline folder or hub id, for its VAE
    train_data_dir: str = "data"  # folder with the *.parquet shards
    output_dir: str = "latents"  # folder for those with latents
    revision: str | None = None  # branch, tag or commit, of a hub id
    variant: str | None = None  # e.g. fp16, of the VAE's file
    original_image_column: str = ""  # "" finds original_image or input_image
    edited_image_column: str = ""  # "" finds edited_image
    edit_prompt_column: str = ""  # "" finds edit_prompt
    max_train_samples: int | None = None  # only the shards that hold the first so many pairs
    resolution: int = 256  # side of the square pictures, pixels
    image_interpolation_mode: Literal["dct", "lanczos", "bicubic"] = "dct"  # dct: while decoding
    mixed_precision: Literal["no", "bf16"] = "no"  # compute dtype of the VAE
    # Pairs at once on each device, at most a row group's; None: 8 at 256 pixels.
    batch_size: int | None = None
    max_bad_fraction: float = 0.1  # share of pairs that cannot be decoded at which it stops
    dataloader_num_workers: int = 0  # decoding threads; 0 takes one per core


def encode_pictures(vae, params, pictures):
    """The VAE's posterior of pictures; CPUs encode one picture after the other.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        pictures: uint8 (B, R, R, 3).

    Returns:
        A distribution with mean and std, float32 (B, h, w, C), not scaled.
    """

    def encode(params, pictures):
        return vae.apply({"params": params}, pictures, method=vae.encode).latent_dist

    def one_by_one(params, pictures):  # so what is at work stays in the caches
        alone = jax.lax.map(partial(encode, params), pictures[:, None])
        return jax.tree.map(lambda x: x[:, 0], alone)

    pictures = jnp.transpose(pictures.astype(jnp.float32) / 127.5 - 1, (0, 3, 1, 2))
    return by_platform(params, pictures, cpu=one_by_one, default=encode)


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
    posterior = encode_pictures(vae, params, jnp.concatenate((pictures, pictures[:, :, ::-1])))
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


def fill(config):
    """Make all shards of latents that are not there yet.

    Args:
        config: Config, or the trainer's, with cache_latents as output_dir.

    Raises:
        ValueError: data or VAE cannot be used, or the folder has something else.
    """
    for name in ("batch_size", "resolution", "max_train_samples"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.dataloader_num_workers < 0:
        raise ValueError(
            f"dataloader_num_workers={config.dataloader_num_workers} must be at least 0"
        )
    if not 0 <= config.max_bad_fraction <= 1:
        raise ValueError(f"max_bad_fraction={config.max_bad_fraction} must be from 0 to 1")
    output_dir = Path(config.output_dir)
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
        raise ValueError(f"resolution={config.resolution} must be a multiple of {factor}")
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

    on_each = config.batch_size or max(1, PIXELS_AT_ONCE // config.resolution**2)
    most = max(group.num_rows for _, of_shard, _ in missing for group in of_shard)
    batch_size = min(on_each, math.ceil(most / mesh.size)) * mesh.size
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


def main(args=None):
    """Command line."""
    config = tyro.cli(Config, description=__doc__, args=args, use_underscores=True)
    try:
        fill(config)
    except KeyboardInterrupt:
        print("interrupted; the shards finished so far are kept", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, jax.errors.JaxRuntimeError):
            if "RESOURCE_EXHAUSTED" not in message:
                raise
            message = "out of device memory; lower --batch_size, or use --mixed_precision bf16"
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    print(f"latents of {config.train_data_dir} are in {config.output_dir}")


if __name__ == "__main__":
    run_main(main)
