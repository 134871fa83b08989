"""Held-out pairs: original images with instructions and, as far as known, edited images.

    pairs = pairs_of_jsonl(Path("pairs.jsonl"))

They come from a list or from parquet shards; encoded images are in memory.
"""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from diffusers_flax.data.images import check_one_shape, decode_image
from diffusers_flax.data.lists import CAPTIONS, NAMES, READ, read_list
from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import (
    REFERENCE,
    choose_instruction,
    find_mask_column,
    list_row_groups,
    pair_at,
    read_columns,
    read_row_group,
)
from diffusers_flax.generating.sizes import fit_image, fit_mask, read_mask_of

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
    reference: bytes | None = None  # a second image, for models that see one
    key: str = ""  # file of the result, without .png; "": its place in the list
    group: str = ""  # type of edit
    session: str = ""  # edits of one image in a row
    turn: int = 1  # in its session, from 1
    after: int | None = None  # place of the pair whose result is edited instead of the original
    parts: tuple[str, ...] = ("",)  # suffixes of the metrics for which the pair counts

    def result_file(self, place, ending=""):
        """Name of the result's file, or with "_SRCIMG" of the image that a judge sees beside it."""
        return f"{self.key or place}{ending}.png"

    def decoded(self, what, size=None):
        """The "original", "edited" or "reference" image, PIL; None if the pair has none.

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

    def decoded_mask(self, size):
        """The mask of a pair that has one, PIL of mode 1, scaled and cropped likewise."""
        return fit_mask(read_mask_of(self.mask, f"the mask of {self.input}"), size)


def pairs_of_jsonl(file, max_pairs=None):
    """The HeldOutPairs of a list, see data/lists.py; max_pairs None: all."""
    required, optional = ("original_image", "edit_prompt"), (*READ[1:], *CAPTIONS)
    pairs = []
    for row in read_list(f"--pairs_jsonl {file}", file, required, optional, max_pairs):
        original, edited, *others = (row[name] and row[name].read_bytes() for name in READ)
        name, captions = str(row["original_image"]), (row[x] for x in CAPTIONS)
        images = original, edited, *captions, *others
        pairs.append(HeldOutPair(len(pairs), name, row["edit_prompt"], *images))
    return pairs


def pairs_of_shards(
    directory: str | Path, columns: Columns, max_pairs: int | None = None
) -> list[HeldOutPair]:
    """Read the pairs of a directory of parquet shards.

    Args:
        directory: of the shards.
        columns: masks and references are read if there are any, as are captions in columns of
            data.lists.NAMES.
        max_pairs: number of pairs to read; None: all.

    Returns:
        List of HeldOutPair. Rows without image or instruction are left out, but count in index.
        The first of several instructions is taken.

    Raises:
        ValueError: the shards cannot be read, have no pair, or lack a named column.
    """
    pairs, first_index = [], 0
    for group in list_row_groups(directory, replace(columns, mask=None), flag="--data_dir"):
        schema = group.metadata.schema.to_arrow_schema()
        mask = find_mask_column(schema, group.path, columns.mask or "", missing_ok=True)
        group = group._replace(mask_column=mask)
        if not group.reference_column and REFERENCE in schema.names:
            group = group._replace(reference_column=REFERENCE)
        cells, texts = read_row_group(group), []
        for key in CAPTIONS:
            found = [name for name in NAMES[key] if name in schema.names]
            texts.append([None] * group.num_rows)
            if found:
                texts[-1] = read_columns(group, found[:1])[found[0]].to_pylist()
        for row in range(group.num_rows):
            pair, name = pair_at(cells, row), f"{group.path} row {group.first_row + row}"
            if pair.original and pair.instruction:
                instruction = choose_instruction(pair.instruction, 0)
                both = (column[row] or None for column in texts)
                images = pair.original, pair.edited or None, *both
                images += pair.mask or None, pair.reference or None
                pairs.append(HeldOutPair(first_index + row, name, instruction, *images))
                if len(pairs) == max_pairs:
                    return pairs
        first_index += group.num_rows
    if not pairs:
        raise ValueError(f"--data_dir {directory} has no row with an image and an instruction")
    return pairs


def pairs_of_one_shape(pairs):
    """The pairs whose images have one aspect ratio; a warning counts the rest.

    Raises:
        ValueError: no pair is left, or an image cannot be decoded.
    """
    kept, error = [], None
    for pair in pairs:
        original = pair.decoded("original")
        edited = pair.decoded("edited") or original
        try:
            check_one_shape(pair.input, original.size, "its truth", edited.size)
            kept.append(pair)
        except ValueError as reason:
            error = reason
    if not kept:
        raise ValueError(f"{error}; no pair is left to measure")
    if error:
        logger.warning("%s; pairs that are left out: %d", error, len(pairs) - len(kept))
    return kept


def checksum_of_pairs(pairs):
    """SHA-256 of the pairs' images, texts, masks and references, 16 digits."""
    total = hashlib.sha256()
    for pair in pairs:
        texts = pair.index, pair.instruction, pair.original_caption, pair.edited_caption
        images = pair.original, pair.edited, pair.mask, *filter(None, [pair.reference])
        for data in (repr(texts).encode(), *images):
            total.update(hashlib.sha256(data or b"").digest())
    return total.hexdigest()[:16]
