"""Flags of parquet_processing.py --pairs: which pairs are written."""

from dataclasses import dataclass
from typing import Annotated, Literal

from diffusers_flax.command_line import AtLeast, Between

Cosine = Annotated[float, Between(-1, 1)]
Fault = Literal["unreadable", "shape", "border", "unchanged", "duplicate", "near_duplicate"]


@dataclass(frozen=True)
class PairsFlags:
    """Which pairs of archives or shards are written, and by whom; None: all."""

    # instead of --train_data_dir: list or directory of image pairs, or an index with archives
    pairs: str = ""
    output_dir: str = ""  # with --pairs: directory for the shards
    overwrite_output_dir: bool = False  # with --pairs: replace earlier shards and held-out pairs
    # with --pairs: only the first N pairs; default: all
    max_pairs: Annotated[int, AtLeast(1)] | None = None
    # with --pairs: original images to hold out, with their edits
    num_held_out: Annotated[int, AtLeast(0)] = 0
    held_out_dir: str = ""  # with --num_held_out: directory for the held-out pairs
    seed: Annotated[int, AtLeast(0)] = 0  # with --num_held_out: seed of the random choice
    drop: tuple[Fault, ...] = ()  # with --pairs of archives: leave out pairs with these faults
    # with --pairs of archives: rows that may be unusable
    max_bad_fraction: Annotated[float, Between(0, 1)] = 0.1
    # with --pairs of archives: this worker's index, from 0
    worker: Annotated[int, AtLeast(0)] | None = None
    # with --worker: workers that divide the archives of one disk
    num_workers: Annotated[int, AtLeast(1)] | None = None
    # with --pairs of shards by make_pairs.py: least CLIP score of each image and its caption
    min_clip_text: Cosine | None = None
    min_clip_image: Cosine | None = None  # likewise: of both images
    min_clip_direction: Cosine | None = None  # likewise: of the change of images and of captions
    # likewise: of each line of captions the N with the largest clip_direction
    num_kept: Annotated[int, AtLeast(1)] | None = None


def check_workers(config) -> None:
    """Raise a ValueError unless --worker and --num_workers fit together."""
    worker, num_workers = config.worker, config.num_workers
    if (worker is None) != (num_workers is None):
        raise ValueError("--worker K and --num_workers N go together; give both or none")
    if worker is not None and worker >= num_workers:
        raise ValueError(f"--worker {worker} must be from 0 to --num_workers {num_workers} - 1")
