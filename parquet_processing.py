"""Parquet shards of (image, instruction, edited image) to training batches.

The data half of flax_train_instruct_pix2pix.py. Run by itself it describes a directory of shards
and draws some of its pairs:

    python parquet_processing.py --train_data_dir data

or first writes the shards, of your own images (parquet_pairs.py has the forms of the list):

    python parquet_processing.py --pairs pairs.jsonl --output_dir data

with lines such as {"input": "a.jpg", "edit": "make it red", "edited": "a-red.jpg"}. A description
by a few rows, quick on one CPU core:

    python parquet_processing.py --train_data_dir data --num_checked 100 --num_preview 4

In code it is a plain iterator of NumPy batches, and a torch IterableDataset:

    for batch in ParquetImagePairs("data", batch_size=16): ...

Needs a CPU only. A pair of 512x512 JPEGs takes about 3 ms of one core to decode at 256x256
(`python -m benchmarks.data` measures it). Images are prepared as in InstructPix2Pix
(arXiv 2211.09800).
"""

import dataclasses
import io
import math
import textwrap
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from command_line import run_main
from images import FORMATS, check_image_file, crop_square, decode_image, save_image
from parquet_dataset import ParquetImagePairs
from parquet_pairs import write_pairs
from parquet_shards import (
    KNOWN_COLUMNS,
    Cells,
    Pair,
    RowGroup,
    decode_pair,
    latents_of,
    list_row_groups,
    pair_at,
    read_row_group,
)

__all__ = ["ParquetImagePairs"]  # what other files import from here


@dataclass(frozen=True)
class Config:
    train_data_dir: str = ""  # directory with *.parquet shards to describe
    pairs: str = ""  # instead: .jsonl or .csv list of image pairs, or directory of them
    output_dir: str = ""  # with --pairs: empty or new directory for the shards
    max_pairs: int | None = None  # with --pairs: only the first so many
    num_held_out: int = 0  # with --pairs: original images left out of the shards, with their edits
    held_out_dir: str = ""  # with --num_held_out: empty or new directory for these
    seed: int = 0  # with --num_held_out: of their choice, at least 0
    original_image_column: str = ""  # image to edit; "" finds original_image or input_image
    edited_image_column: str = ""  # image after the edit; "" finds edited_image
    edit_prompt_column: str = ""  # instruction; "" finds edit_prompt
    num_checked: int = 2000  # rows to decode, from row groups all over the folder; 0: all rows
    num_named: int = 20  # unreadable rows to name
    preview: str = "preview.png"  # image of some pairs; "" draws none
    num_preview: int = 8  # pairs in it
    resolution: int = 256  # side of its images, pixels


def describe(groups: list[RowGroup]) -> str:
    """Shards, rows, columns and row groups of a folder in a few lines."""
    shards = {group.path: group.metadata for group in groups}
    schema = next(iter(shards.values())).schema.to_arrow_schema()
    roles = dict(zip(groups[0].columns, ("original image", "edited image", "prompt")))
    rows = [group.num_rows for group in groups]
    stored = [
        sum(row_group.column(c).total_compressed_size for c in range(row_group.num_columns))
        for row_group in (group.metadata.row_group(group.index) for group in groups)
    ]
    return "\n".join(
        [
            f"shards      {len(shards)}, {megabytes(sum(p.stat().st_size for p in shards))}",
            f"rows        {sum(rows)}",
            "columns     "
            + "\n            ".join(
                f"{field.name}: {field.type}"
                + (f"  <- {roles[field.name]}" if field.name in roles else "")
                for field in schema
            ),
            f"row groups  {len(groups)}; rows min {min(rows)}, median {np.median(rows):g}, "
            f"max {max(rows)}; bytes min {megabytes(min(stored))}, "
            f"median {megabytes(np.median(stored))}, max {megabytes(max(stored))}",
        ]
    )


def check_pair(
    cells: Cells, position: int, columns: tuple[str, str, str]
) -> tuple[Pair, list[str]]:
    """Decode a pair; it, and format, size and mode of both images.

    Raises:
        ValueError: something of the pair is missing or cannot be decoded.
    """
    pair = pair_at(cells, position)
    pixels = np.empty((2, 16, 16, 3), np.uint8)  # small: JPEGs are read to their end all the same
    decode_pair(pair, pixels, columns, "bicubic", 0.5, False)
    kinds = []
    for data in pair[:2]:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        kinds.append(f"{image.format} {image.width}x{image.height} {image.mode}")
    return pair, kinds


def check_rows(groups: list[RowGroup], num_checked: int) -> Iterator[tuple[str, Future]]:
    """Read the first rows of some row groups and check them in threads.

    Args:
        groups: of one folder.
        num_checked: rows, about, from as few row groups as hold them but from 8 at least: the
            first row may cost as much to read as the whole group. 0, or more than there are,
            checks all.

    Yields:
        Name of the row, and the future of its `check_pair`.
    """
    num_rows = sum(group.num_rows for group in groups)
    per_group = num_rows
    if 0 < num_checked < num_rows:
        enough = max(8, math.ceil(num_checked * len(groups) / num_rows))
        picks = np.linspace(0, len(groups) - 1, min(enough, len(groups))).astype(int)
        groups = [groups[pick] for pick in picks]
        per_group = math.ceil(num_checked / len(groups))
    stops = [min(per_group, group.num_rows) for group in groups]
    with (
        ThreadPoolExecutor() as pool,
        tqdm(total=sum(stops), desc="checking", unit="row", disable=None) as progress,
    ):
        ahead = deque()
        for group, stop in zip(groups, stops):
            cells = read_row_group(group)
            for position in range(stop):
                name = f"{group.path.name} row {group.first_row + position}"
                check = pool.submit(check_pair, cells, position, group.columns)
                ahead.append((name, check))
                if len(ahead) > 64:
                    yield ahead.popleft()
                progress.update()
        yield from ahead


def draw_preview(pairs: list[Pair], resolution: int) -> Image.Image:
    """Draw pairs side by side, original left and edited right, the prompt under each."""
    font = ImageFont.load_default(size=max(10, resolution // 16))
    line_height = math.ceil(font.size * 1.3)
    letters = max(12, int(2 * resolution / (0.52 * font.size)))
    gap = max(4, resolution // 32)
    across = max(1, round(math.sqrt(len(pairs) / 2)))
    width, height = 2 * resolution + gap, resolution + 2 * line_height + gap
    size = (across * width + gap, math.ceil(len(pairs) / across) * height + gap)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, pair in enumerate(pairs):
        x, y = gap + i % across * width, gap + i // across * height
        for data in pair[:2]:
            square = crop_square(decode_image(data, 2 * resolution), resolution, "lanczos")
            sheet.paste(Image.fromarray(square), (x, y))
            x += resolution
        lines = textwrap.wrap(pair.prompt, letters, max_lines=2, placeholder=" ...")
        for n, line in enumerate(lines):
            draw.text((x - 2 * resolution, y + resolution + n * line_height), line, "black", font)
    return sheet


def megabytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def check(config: Config) -> None:
    """Refuse flags with bad values, and those that do not go together."""
    if bool(config.train_data_dir) == bool(config.pairs):
        raise ValueError(
            "give --train_data_dir DIR to describe shards, or --pairs LIST --output_dir DIR to "
            "write them"
        )
    if config.pairs:
        if not config.output_dir:
            raise ValueError("--pairs needs --output_dir DIR, for the shards")
        if bool(config.num_held_out) != bool(config.held_out_dir):
            raise ValueError("--num_held_out N and --held_out_dir DIR go together; give both")
        unused, other = KNOWN_COLUMNS, "--train_data_dir; --pairs knows its columns by their names"
    else:
        unused = ("output_dir", "max_pairs", "num_held_out", "held_out_dir", "seed")
        other = "--pairs"
    for field in dataclasses.fields(Config):
        if field.name in unused and getattr(config, field.name) != field.default:
            raise ValueError(f"--{field.name} goes with {other}")
    for name, lowest in (("max_pairs", 1), ("num_held_out", 0), ("seed", 0)):
        if (value := getattr(config, name)) is not None and value < lowest:
            raise ValueError(f"--{name} {value} must be at least {lowest}")
    for name in ("resolution", "num_preview"):
        if getattr(config, name) <= 0:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.num_checked < 0:
        raise ValueError(f"num_checked={config.num_checked} must be at least 0, which checks all")
    if config.preview:
        try:
            check_image_file(Path(config.preview))
        except ValueError as error:
            raise ValueError(f"--preview {error}") from error


def inspect(config: Config) -> None:
    """Describe a directory of shards on standard output and write the preview.

    Raises:
        ValueError: a bad directory, or no pair that can be decoded.
    """
    groups = list_row_groups(
        config.train_data_dir,
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
    )
    if latents_of(groups[0].metadata):
        raise ValueError(f"{config.train_data_dir} holds latents; only images can be looked at")
    print(describe(groups), flush=True)

    num_rows, kinds, bad, shown = 0, (Counter(), Counter()), [], []
    num_expected = min(config.num_checked or math.inf, sum(group.num_rows for group in groups))
    for name, check in check_rows(groups, config.num_checked):
        try:
            pair, kinds_of_pair = check.result()
            for counter, kind in zip(kinds, kinds_of_pair):
                counter[kind] += 1
            if len(shown) < config.num_preview * (num_rows + 1) / num_expected:
                shown.append(pair)
        except ValueError as error:
            bad.append(f"{name}: {error}")
        num_rows += 1

    whole = num_rows == sum(group.num_rows for group in groups)
    print("checked     " + (f"all {num_rows} rows" if whole else f"{num_rows} rows (a sample)"))
    for column, counter in zip(groups[0].columns, kinds):
        common = ", ".join(f"{count} x {kind}" for kind, count in counter.most_common(5))
        more = f" and {len(counter) - 5} other kinds" if len(counter) > 5 else ""
        print(f"{column}: {common}{more}")
    print(f"unreadable  {len(bad)} of {num_rows} rows")
    for line in bad[: config.num_named]:
        print(f"            {line}")
    if len(bad) > config.num_named:
        print(f"            and {len(bad) - config.num_named} more")
    if len(bad) > 0.1 * num_rows:
        print("            training stops at more than --max_bad_fraction of them, 0.1 if not set")
    if not shown:
        raise ValueError(
            f"none of the {num_rows} rows checked in {config.train_data_dir} can be decoded; "
            f"the first is {bad[0]}"
        )
    shown = shown[: config.num_preview]
    print("prompts     " + "\n            ".join(repr(pair.prompt) for pair in shown))

    if config.preview:
        save_image(draw_preview(shown, config.resolution), Path(config.preview))
        print(f"preview     {config.preview}")


def run(config: Config) -> None:
    """Write shards if there are pairs, and describe the directory."""
    check(config)
    if config.pairs:
        report = write_pairs(
            Path(config.pairs),
            Path(config.output_dir),
            max_pairs=config.max_pairs,
            num_held_out=config.num_held_out,
            held_out_dir=Path(config.held_out_dir) if config.held_out_dir else None,
            seed=config.seed,
        )
        print(report, flush=True)
        config = dataclasses.replace(config, train_data_dir=config.output_dir)
    try:
        inspect(config)
    except KeyboardInterrupt:
        if config.pairs:
            raise KeyboardInterrupt(
                f"the shards are complete; --train_data_dir {config.output_dir} describes them"
            ) from None
        raise


def main(args: list[str] | None = None) -> None:
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted="run the same command again")


if __name__ == "__main__":
    main()
