"""Parquet shards of (image, instruction, edited image), as batches for training.

The data loader, ParquetImagePairs, is in diffusers_flax/data/dataset.py: an iterator of NumPy
batches and a torch IterableDataset.

    for batch in ParquetImagePairs("data", batch_size=16): ...

Run as a script, it describes a directory of shards and draws a preview of some pairs:

    python parquet_processing.py --train_data_dir data --num_checked 100 --num_preview 4

It also writes shards from your own images (docs/data.md has the formats of the list):

    python parquet_processing.py --pairs pairs.jsonl --output_dir data

with lines such as {"input": "a.jpg", "edit": "make it red", "edited": "a-red.jpg"}; from archives
with an index; and from other shards, of which it chooses pairs:

    python parquet_processing.py --pairs data --output_dir clean --min_clip_direction 0.25

Needs only a CPU. Decoding a pair of 512x512 JPEGs at 256x256 takes about 3 ms on one core. Images
are prepared as in InstructPix2Pix (arXiv 2211.09800).
"""

import dataclasses
import io
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image
from tqdm import tqdm

from diffusers_flax.command_line import AtLeast, Between, check_image_file, run_main
from diffusers_flax.data.archives.convert import convert_archives, is_archived
from diffusers_flax.data.archives.filtering import (
    SCORES,
    are_shards,
    filter_shards,
    map_rows,
    measure_pair,
)
from diffusers_flax.data.archives.flags import PairsFlags, check_workers
from diffusers_flax.data.dataset import ParquetImagePairs
from diffusers_flax.data.faults import FAULTS, FaultFinder
from diffusers_flax.data.images import crop_image, decode_image
from diffusers_flax.data.known_sets import COLUMN_FLAGS, forbids, set_of_columns
from diffusers_flax.data.mixture import first_metadata
from diffusers_flax.data.options import Columns
from diffusers_flax.data.pairs import check_pair, write_pairs
from diffusers_flax.data.shards import (
    REFERENCE,
    Cells,
    Pair,
    RowGroup,
    choose_instruction,
    find_mask_column,
    latents_metadata,
    list_row_groups,
    pair_at,
)
from diffusers_flax.generating.captions import captioned, tile_grid
from diffusers_flax.images import open_image, save_image

__all__ = ["ParquetImagePairs"]
NUM_EXAMPLES = 4  # of each fault in the image of --report
ARCHIVE_FLAGS = ("drop", "max_bad_fraction", "worker", "num_workers")
SCORE_FLAGS = (*SCORES, "num_kept")
PAIRS_FLAGS = tuple(field.name for field in dataclasses.fields(PairsFlags)[1:])


@dataclass(frozen=True)
class Config(PairsFlags):
    train_data_dir: str = ""  # directory or URL of *.parquet shards to describe
    original_image_column: str = ""  # image to edit; "": as in a known set, docs/data.md
    edited_image_column: str = ""  # image after the edit; "": likewise
    edit_prompt_column: str = ""  # instruction or several; "": likewise
    mask_column: str = ""  # masks, checked if there are any; "": mask_img, mask_image or mask
    reference_image_column: str = ""  # second images, likewise; "": reference_image
    # rows to decode, sampled over all row groups; 0: all rows
    num_checked: Annotated[int, AtLeast(0)] = 2000
    report: str = ""  # count faults of the checked pairs; image file for examples of each
    preview: str = "preview.png"  # file for an image of some pairs; "": none
    num_preview: Annotated[int, Between(1, 256)] = 8  # pairs in the preview
    resolution: Annotated[int, Between(1, 2048)] = 256  # side of the preview's images, pixels


def given_flags(config: Config, names: tuple[str, ...]) -> list[str]:
    """The given ones among some flags, with --."""
    return [f"--{name}" for name in names if getattr(config, name) != getattr(Config, name)]


def check_flags(config: Config) -> None:
    """Raise a ValueError for flags that contradict each other."""
    if bool(config.train_data_dir) == bool(config.pairs):
        raise ValueError(
            "give --train_data_dir DIR to describe shards, or --pairs LIST --output_dir DIR to "
            "write them"
        )
    unused, other = PAIRS_FLAGS, "--pairs"
    if config.pairs:
        unused = (*COLUMN_FLAGS, "mask_column", "reference_image_column")
        other = "--train_data_dir; --pairs finds columns by their names"
        if "://" in config.pairs:
            raise ValueError(f"--pairs {config.pairs} is a URL; download it with script.py first")
        if not config.output_dir:
            raise ValueError("--pairs needs --output_dir DIR for the shards")
    if wrong := given_flags(config, unused):
        raise ValueError(f"{wrong[0]} goes with {other}")
    if bool(config.num_held_out) != bool(config.held_out_dir):
        raise ValueError("--num_held_out N and --held_out_dir DIR go together; give both or none")
    check_workers(config)
    for file in filter(None, (config.preview, config.report)):
        check_image_file(Path(file))


def write_shards(config: Config) -> str:
    """Write shards from --pairs; a summary."""
    pairs, output_dir = Path(config.pairs), Path(config.output_dir)
    by_scores = given_flags(config, SCORE_FLAGS)
    if by_scores or are_shards(pairs):
        if not by_scores and not config.drop and not config.num_held_out:
            raise ValueError(
                f"--pairs {pairs} has shards, which training reads as they are; choose pairs with "
                "--drop, --num_held_out, --num_kept or --min_clip_direction"
            )
        return filter_shards(pairs, output_dir, config)
    if is_archived(pairs):
        return convert_archives(pairs, output_dir, config)
    if wrong := given_flags(config, ARCHIVE_FLAGS):
        raise ValueError(f"{wrong[0]} goes with archives, not with --pairs {pairs}")
    return write_pairs(pairs, output_dir, config)


def describe_shards(groups: list[RowGroup]) -> str:
    """Summarise shards, rows, known set, columns and row groups of a directory in a few lines."""
    shards = {group.path: group.metadata for group in groups}
    schema = next(iter(shards.values())).schema.to_arrow_schema()
    roles = {groups[0].mask_column: "mask, read for --mask_loss_weight"}
    roles[groups[0].reference_column] = "reference image, read by a UNet that takes two images"
    roles |= dict(zip(groups[0].columns, ("original image", "edited image", "prompt")))
    columns = []
    for field in schema:
        role = f"  <- {roles[field.name]}" if field.name in roles else ""
        columns.append(f"{field.name}: {field.type}{role}")
    pairs = []
    for names in sorted({group.columns for group in groups}):
        known = set_of_columns(names).name
        pairs.append("{} to {} by {}".format(*names) + (f", as in {known}" if known else ""))
    num_bytes = tqdm.format_sizeof(sum(path.stat().st_size for path in shards), suffix="B")
    return "\n".join(
        [
            f"shards      {len(shards)}, {num_bytes}",
            f"rows        {sum(group.num_rows for group in groups)}, row groups {len(groups)}",
            f"pairs       {'; '.join(pairs)}",
            "columns     " + "\n            ".join(columns),
        ]
    )


def formats_of(cells: Cells, position: int) -> tuple[Pair, list[str]]:
    """Decode a pair; return it with format, size and mode of both images.

    Raises:
        ValueError: it cannot be used.
    """
    pair = pair_at(cells, position)
    check_pair(pair)
    formats = []
    for data in pair[:2]:
        image = open_image(io.BytesIO(data))
        formats.append(f"{image.format} {image.width}x{image.height} {image.mode}")
    return pair, formats


def sample_rows(groups: list[RowGroup], num_checked: int) -> list[tuple[RowGroup, range]]:
    """The first rows of evenly spaced row groups.

    Args:
        groups: row groups of one directory.
        num_checked: approximate number of rows; 0: all. They come from few row groups, but at
            least 8: reading one row can cost as much as reading its row group.
    """
    num_rows = per_group = sum(group.num_rows for group in groups)
    if 0 < num_checked < num_rows:
        num_groups = max(8, math.ceil(num_checked * len(groups) / num_rows))
        indices = np.linspace(0, len(groups) - 1, min(num_groups, len(groups))).astype(int)
        groups = [groups[index] for index in indices]
        per_group = math.ceil(num_checked / len(groups))
    return [(group, range(min(per_group, group.num_rows))) for group in groups]


def draw_preview(pairs: list[Pair], resolution: int) -> Image.Image:
    """Draw pairs as (original, reference if any, edited) with the prompt below, in a grid."""
    tiles = []
    for pair in pairs:
        images = filter(None, (pair.original, pair.reference, pair.edited))
        decoded = (decode_image(data, (2 * resolution,) * 2) for data in images)
        squares = (crop_image(pixels, (resolution,) * 2, "lanczos") for pixels in decoded)
        text = choose_instruction(pair.instruction, 0)
        tiles.append(captioned(list(map(Image.fromarray, squares)), text, max_lines=2))
    num_columns = max(1, round(math.sqrt(len(pairs) / 2)))
    return tile_grid(tiles, num_columns, margin=max(4, resolution // 32))


def describe_and_preview(config: Config) -> None:
    """Print a description of a directory of shards and write the preview.

    Raises:
        ValueError: the directory is invalid, or no checked row can be decoded.
    """
    names = (getattr(config, name) for name in COLUMN_FLAGS)
    mask, shard = config.mask_column, first_metadata(config.train_data_dir)
    reference = config.reference_image_column
    if shard:
        schema = shard.schema.to_arrow_schema()
        mask = mask or find_mask_column(schema, config.train_data_dir, missing_ok=True)
        reference = reference or (REFERENCE if REFERENCE in schema.names else "")
    columns = Columns(*names, mask=mask or None, reference_image=reference or None)
    groups = list_row_groups(config.train_data_dir, columns)
    if latents_metadata(groups[0].metadata):
        raise ValueError(
            f"--train_data_dir {config.train_data_dir} contains latents; name the directory of the "
            "images"
        )
    print(describe_shards(groups), flush=True)
    licence = set_of_columns(groups[0].columns).licence
    if forbidden := forbids(licence):
        print(f"licence     {licence} forbids {forbidden}")

    formats, unreadable, num_rows = (Counter(), Counter()), [], 0
    preview_pairs, num_references = [], 0
    sample = sample_rows(groups, config.num_checked)
    num_expected = sum(len(positions) for _, positions in sample)
    for group, position, checked in map_rows(sample, formats_of):
        try:
            pair, pair_formats = checked.result()
            for counter, name in zip(formats, pair_formats):
                counter[name] += 1
            num_references += pair.reference is not None
            if len(preview_pairs) < config.num_preview * (num_rows + 1) / num_expected:
                preview_pairs.append(pair)
        except ValueError as error:
            row = group.first_row + position
            unreadable.append(f"{group.path.name} row {row}: {error}")
        num_rows += 1
    is_all = num_rows == sum(group.num_rows for group in groups)
    print("checked     " + (f"all {num_rows} rows" if is_all else f"{num_rows} rows (a sample)"))
    for column, counter in zip(groups[0].columns, formats):
        common = [f"{count} x {name}" for name, count in counter.most_common(5)]
        print(f"{column}: {', '.join(common)}")
    if reference:
        print(f"{reference}: {num_references} of {num_rows} rows")
    print(f"unreadable  {len(unreadable)} of {num_rows} rows")
    for line in unreadable[:20]:
        print(f"            {line}")
    if not preview_pairs:
        raise ValueError(
            f"none of the {num_rows} checked rows in {config.train_data_dir} can be used; the "
            f"first error: {unreadable[0]}"
        )
    preview_pairs = preview_pairs[: config.num_preview]
    prompts = [repr(choose_instruction(pair.instruction, 0)) for pair in preview_pairs]
    print("prompts     " + "\n            ".join(prompts))
    if config.report:
        print(report_faults(groups, config))
    if config.preview:
        save_image(draw_preview(preview_pairs, config.resolution), Path(config.preview))
        print(f"preview     {config.preview}")


def report_faults(groups: list[RowGroup], config: Config) -> str:
    """Count the faults of pairs, draw examples to --report, and say what leaves them out."""
    counts, examples, num_pairs, finder = Counter(), {}, 0, FaultFinder()
    for _, _, measured in map_rows(sample_rows(groups, config.num_checked), measure_pair):
        pair, text, values = measured.result()
        faults, num_pairs = finder.find(values, text), num_pairs + 1
        counts.update(faults)
        for fault in faults:
            if fault != "unreadable" and len(examples.setdefault(fault, [])) < NUM_EXAMPLES:
                examples[fault].append(pair._replace(instruction=f"{fault}: {text}"))
    found = [name for name in FAULTS if counts[name]]
    lines = [f"report      {num_pairs} pairs, {len(found)} kinds of faults"]
    lines += [f"            {counts[name]} {name}: {FAULTS[name]}" for name in found]
    if found:
        source = config.pairs or config.train_data_dir
        lines.append(
            f"            without them: --pairs {source} --output_dir NEW --drop {' '.join(found)}"
        )
    pairs = [pair for name in found for pair in examples.get(name, [])]
    if pairs:
        save_image(draw_preview(pairs, config.resolution), Path(config.report))
        lines.append(f"            {config.report} has examples")
    return "\n".join(lines)


def run(config: Config) -> None:
    """Write shards from --pairs, if given, and describe the directory."""
    check_flags(config)
    if config.pairs:
        print(write_shards(config), flush=True)
        config = dataclasses.replace(config, train_data_dir=config.output_dir)
    describe_and_preview(config)


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    run_main(Config, __doc__, run, args, interrupted="run the same command again")


if __name__ == "__main__":
    main()
