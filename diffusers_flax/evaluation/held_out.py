"""Held-out pairs: original images with instructions and, as far as known, edited images.

    pairs = pairs_of_jsonl(Path("pairs.jsonl"))

They come from a list or from parquet shards; encoded images are in memory.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from diffusers_flax.data.images import check_one_shape, decode_image, encoded_size
from diffusers_flax.data.lists import CAPTIONS, READ, read_list
from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import (
    choose_instruction,
    find_mask_column,
    latents_metadata,
    list_row_groups,
    open_row_group,
    pair_at,
    read_row_group,
)
from diffusers_flax.generating.masks import fit_mask, read_mask_of
from diffusers_flax.generating.sizes import fit_image
from diffusers_flax.messages import one_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HeldOutPair:
    """An original image, an instruction, and the edited image if it is known; images are encoded.

    The fields from key on are of a benchmark's set, see evaluation/benchmark_sets.py.
    """

    index: int  # place in the list, on which the noise depends
    input: str  # names the pair in messages
    instruction: str
    original: bytes
    edited: bytes | None = None
    original_caption: str | None = None
    edited_caption: str | None = None
    mask: bytes | None = None  # white where the edited image may differ from the original
    key: str = ""  # file of the result, without .png; "": its place in the list
    group: str = ""  # type of edit
    session: str = ""  # edits of one image in a row
    turn: int = 1  # in its session, from 1
    after: int | None = None  # place of the pair whose result is edited instead of the original
    parts: tuple[str, ...] = ("",)  # suffixes of the metrics for which the pair counts

    def result_file(self, place):
        """Name of the result's file."""
        return f"{self.key or place}.png"

    def decoded(self, what, size=None):
        """The "original" or "edited" image, PIL; None if the pair has none.

        size: (width, height) to which it is scaled and cropped; None: as it is.
        """
        data = getattr(self, what)
        if data is None:
            return None
        try:
            image = Image.fromarray(decode_image(data))
        except ValueError as error:
            raise ValueError(f"{self.input}: {error}") from error
        return image if size is None else fit_image(image, size)

    def decoded_mask(self, size=None):
        """The mask, PIL of mode 1, scaled and cropped likewise; None if the pair has none."""
        if self.mask is None:
            return None
        mask = read_mask_of(self.mask, f"the mask of {self.input}")
        return mask if size is None else fit_mask(mask, size)


def pairs_of_jsonl(file, max_pairs=None):
    """The HeldOutPairs of a list, see data/lists.py; max_pairs None: all."""
    required, optional = ("original_image", "edit_prompt"), ("edited_image", "mask", *CAPTIONS)
    pairs = []
    for row in read_list(f"--pairs_jsonl {file}", file, required, optional, max_pairs):
        images = [row[name].read_bytes() if row[name] else None for name in READ]
        pair = HeldOutPair(len(pairs), str(row["original_image"]), row["edit_prompt"], *images[:2])
        captions = dict(zip(("original_caption", "edited_caption"), (row[x] for x in CAPTIONS)))
        pairs.append(replace(pair, mask=images[2], **captions))
    return pairs


def pairs_of_shards(
    directory: str | Path,
    columns: Columns,
    captions: tuple[str, str] = ("", ""),
    max_pairs: int | None = None,
) -> list[HeldOutPair]:
    """Read the pairs of a directory of parquet shards.

    Args:
        directory: of the shards.
        columns: with mask "" masks are read if there are any.
        captions: columns of both captions; "": original_prompt and edited_prompt, if they exist.
        max_pairs: number of pairs to read; None: all.

    Returns:
        List of HeldOutPair. Rows without image or instruction are left out, but count in index.
        The first of several instructions is taken.

    Raises:
        ValueError: the shards cannot be read, have latents or no pair, or lack a named column.
    """
    groups = list_row_groups(directory, replace(columns, mask=None), flag="--data_dir")
    cells = (cell for group in groups for cell in cells_of_group(group, columns.mask, captions))
    pairs = []
    for index, (name, pair, texts) in enumerate(cells):
        if len(pairs) == max_pairs:
            break
        instruction = pair.instruction and choose_instruction(pair.instruction, 0)
        if pair.original and instruction:
            images = pair.original, pair.edited or None
            pairs.append(HeldOutPair(index, name, instruction, *images, *texts, pair.mask or None))
    if not pairs:
        raise ValueError(f"--data_dir {directory} has no row with an image and an instruction")
    return pairs


def cells_of_group(group, mask_column, captions):
    """Yield (name of the row, data.shards.Pair, both captions or None) of a RowGroup's rows."""
    schema, texts = group.metadata.schema.to_arrow_schema(), {}
    if latents_metadata(group.metadata) is not None:
        raise ValueError(f"{group.path} has latents; name the directory of the images")
    for given in filter(None, captions):
        if given not in schema.names:
            names = ", ".join(schema.names)
            raise ValueError(f"{group.path} has no column {given}; it has {names}")
    names = [given or default for given, default in zip(captions, CAPTIONS)]
    if mask_column is not None:
        mask_column = find_mask_column(schema, group.path, mask_column, missing_ok=True)
        group = group._replace(mask_column=mask_column)
    try:
        cells = read_row_group(group)
        wanted = [name for name in names if name in schema.names]
        with open_row_group(group, wanted) as file:
            texts = file.read_row_group(group.index, columns=wanted).to_pydict()
        pairs = [pair_at(cells, number) for number in range(group.num_rows)]
    except Exception as error:  # damaged pages raise errors of many types
        reason = one_line(error, 200)
        raise ValueError(f"{group.path} cannot be read: {reason}; download it again") from error
    for number, pair in enumerate(pairs):
        found = (texts[name][number] or None if name in texts else None for name in names)
        yield f"{group.path} row {group.first_row + number}", pair, found


def check_pairs(pairs, use_masks, bar=iter, any_shape=False):
    """Decode all images and masks, to check them.

    Args:
        pairs: list of HeldOutPair.
        use_masks: whether the edits need the masks.
        bar: function of an iterable, for progress.
        any_shape: keep pairs whose images have two aspect ratios.

    Returns:
        The pairs whose images have the same aspect ratio. Without use_masks, damaged masks become
        None. A warning counts each kind.

    Raises:
        ValueError: an image cannot be decoded; with use_masks, a mask; or no pair is left.
    """
    checked, damaged_masks, of_two_shapes = [], [], []
    for pair in bar(pairs):
        for what in ("original", "edited"):
            pair.decoded(what)
        try:
            if pair.edited is not None and not any_shape:
                sizes = encoded_size(pair.original), encoded_size(pair.edited)
                check_one_shape(pair.input, sizes[0], "its truth", sizes[1])
        except ValueError as error:
            of_two_shapes.append(error)
            continue
        try:
            if (mask := pair.decoded_mask()) is not None:
                check_one_shape(pair.input, encoded_size(pair.original), "its mask", mask.size)
        except ValueError as error:
            if use_masks:
                raise
            damaged_masks.append(error)
            pair = replace(pair, mask=None)
        checked.append(pair)
    if not checked:
        raise ValueError(f"{of_two_shapes[0]}; no pair is left to measure")
    for errors, what in ((of_two_shapes, "are left out"), (damaged_masks, "have no mask now")):
        if errors:
            logger.warning("%s; pairs that %s: %d", errors[0], what, len(errors))
    return checked


def require_masks(pairs, sizes):
    """Raise a ValueError if no pair has a mask, or a mask has no white at the edit's size."""
    if all(pair.mask is None for pair in pairs):
        raise ValueError("--use_masks: no pair has a mask; give masks, or leave the flag out")
    for pair, size in zip(pairs, sizes):
        mask = pair.decoded_mask(size)
        if mask is not None and not mask.getbbox():
            raise ValueError(
                f"--use_masks: the mask of {pair.input} has no white at the size of the edit, "
                f"{size[0]}x{size[1]} (width x height); paint a larger part white"
            )


def checksum_of_pairs(pairs):
    """SHA-256 of the pairs' images, texts and masks, 16 digits."""
    total = hashlib.sha256()
    for pair in pairs:
        texts = [pair.index, pair.instruction, pair.original_caption, pair.edited_caption]
        total.update(json.dumps(texts).encode())
        for data in (pair.original, pair.edited, pair.mask):
            total.update(hashlib.sha256(data or b"").digest())
    return total.hexdigest()[:16]
