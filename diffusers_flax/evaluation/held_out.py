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
from diffusers_flax.evaluation.metrics import CLIP_METRICS
from diffusers_flax.generating.masks import fit_mask, read_mask_of
from diffusers_flax.generating.sizes import fit_image
from diffusers_flax.messages import one_line

CAPTION_COLUMNS = {
    "original_prompt_column": "original_prompt",
    "edited_prompt_column": "edited_prompt",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HeldOutPair:
    """An original image, an instruction, and the edited image if it is known.

    Images are encoded. The noise depends on index, the place in the list; input names the pair in
    messages. mask is white where the edited image may differ from the original. The rest is of a
    benchmark's set, see evaluation/benchmark_sets.py.
    """

    index: int
    input: str
    instruction: str
    original: bytes
    edited: bytes | None = None
    original_caption: str | None = None
    edited_caption: str | None = None
    mask: bytes | None = None
    key: str = ""  # file of the result, without .png; "": its place in the list
    group: str = ""  # kind of edit
    session: str = ""  # edits of one image in a row
    turn: int = 1  # in its session, from 1
    after: int | None = None  # place of the pair whose result is edited instead of the original
    parts: tuple[str, ...] = ("",)  # suffixes of the metrics for which the pair counts

    def result_file(self, place):
        """Name of the result's file."""
        return f"{self.key or place}.png"

    def size(self):
        """(width, height) of the original image."""
        return self._decode(self.original).size

    def fitted_original(self, size=None):
        """The original image, PIL, scaled and cropped to size (width, height); None: as it is."""
        image = self._decode(self.original)
        return image if size is None else fit_image(image, size)

    def fitted_edited(self, size=None):
        """The edited image, likewise; None if unknown."""
        if self.edited is None:
            return None
        image = self._decode(self.edited)
        return image if size is None else fit_image(image, size)

    def fitted_mask(self, size):
        """The mask, PIL of mode 1, likewise, or None."""
        if self.mask is None:
            return None
        return fit_mask(read_mask_of(self.mask, f"the mask of {self.input}"), size)

    def check(self):
        """Raise a ValueError if an image cannot be decoded."""
        for data in filter(None, (self.original, self.edited)):
            self._decode(data)

    def check_shape(self):
        """Raise a ValueError if the images have two aspect ratios."""
        if self.edited is not None:
            sizes = encoded_size(self.original), encoded_size(self.edited)
            check_one_shape(self.input, sizes[0], "its truth", sizes[1])

    def check_mask(self):
        """Raise a ValueError if the mask cannot be decoded, or has another aspect ratio."""
        if self.mask is not None:
            mask = read_mask_of(self.mask, f"the mask of {self.input}")
            check_one_shape(self.input, encoded_size(self.original), "its mask", mask.size)

    def _decode(self, data):
        try:
            return Image.fromarray(decode_image(data))
        except ValueError as error:
            raise ValueError(f"{self.input}: {error}") from error


def pairs_of_jsonl(file, max_pairs=None):
    """Read a list of pairs; see data/lists.py. Original image and instruction are required.

    Args:
        file: path.
        max_pairs: number of pairs to read; None: all.

    Returns:
        List of HeldOutPair.

    Raises:
        ValueError: a row is invalid, or a file cannot be read.
    """
    required, optional = ("original_image", "edit_prompt"), ("edited_image", "mask", *CAPTIONS)
    pairs = []
    for row in read_list(f"--pairs_jsonl {file}", file, required, optional, max_pairs):
        data = {}
        for name in READ:
            try:
                data[name] = row[name].read_bytes() if row[name] else None
            except OSError as error:
                raise ValueError(
                    f"{file} line {row['line']}: {row[name]} cannot be read: "
                    f"{error.strerror or error}; check the path"
                ) from error
        original_caption, edited_caption = (row[name] for name in CAPTIONS)
        pairs.append(
            HeldOutPair(
                index=len(pairs),
                input=str(row["original_image"]),
                instruction=row["edit_prompt"],
                original=data["original_image"],
                edited=data["edited_image"],
                original_caption=original_caption,
                edited_caption=edited_caption,
                mask=data["mask"],
            )
        )
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
        ValueError: see list_row_groups; a named column is missing, or the shards have latents.
    """
    groups = list_row_groups(directory, replace(columns, mask=None), flag="--data_dir")
    pairs, row_index = [], 0
    for group in groups:
        if latents_metadata(group.metadata) is not None:
            raise ValueError(
                f"--data_dir {directory} has shards of latents; name the directory of the images"
            )
        schema = group.metadata.schema.to_arrow_schema()
        names, caption_columns = schema.names, []
        for (flag, default), given in zip(CAPTION_COLUMNS.items(), captions):
            if given and given not in names:
                raise ValueError(
                    f"{group.path} has no column {given}; it has {', '.join(names)}: choose one "
                    f"with --{flag}"
                )
            caption_columns.append(given or default)
        if columns.mask is not None:
            mask = find_mask_column(schema, group.path, columns.mask, missing_ok=True)
            group = group._replace(mask_column=mask)
        wanted = [name for name in caption_columns if name in names]
        try:
            cells = read_row_group(group)
            with open_row_group(group, wanted) as file:
                texts = file.read_row_group(group.index, columns=wanted)
        except Exception as error:  # damaged pages raise errors of many types
            raise ValueError(
                f"{group.path} cannot be read: {one_line(error, 200)}; download it again"
            ) from error
        for number in range(group.num_rows):
            if len(pairs) == max_pairs:
                return pairs
            name = f"{group.path} row {group.first_row + number}"
            try:
                pair = pair_at(cells, number)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            instruction = pair.instruction and choose_instruction(pair.instruction, 0)
            if pair.original and instruction:
                original_caption, edited_caption = (
                    caption_at(texts, column, number, name) for column in caption_columns
                )
                pairs.append(
                    HeldOutPair(
                        index=row_index,
                        input=name,
                        instruction=instruction,
                        original=pair.original,
                        edited=pair.edited or None,
                        original_caption=original_caption,
                        edited_caption=edited_caption,
                        mask=pair.mask or None,
                    )
                )
            row_index += 1
    if not pairs:
        raise ValueError(
            f"--data_dir {directory} has no row with an image and an instruction; name a directory "
            "of shards that parquet_processing.py describes"
        )
    return pairs


def caption_at(texts, column, number, name):
    """A caption of a pyarrow Table, or None; number: of the row, name: of it, for errors."""
    if column not in texts.column_names:
        return None
    try:
        return texts[column][number].as_py() or None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: the caption in {column} is not UTF-8 ({error})") from error


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
    checked, errors, of_two_shapes = [], [], []
    for pair in bar(pairs):
        pair.check()
        try:
            if not any_shape:
                pair.check_shape()
        except ValueError as error:
            of_two_shapes.append(error)
            continue
        try:
            pair.check_mask()
        except ValueError as error:
            if use_masks:
                raise
            errors.append(error)
            pair = replace(pair, mask=None)
        checked.append(pair)
    if of_two_shapes:
        logger.warning("%s; pairs that are left out: %d", of_two_shapes[0], len(of_two_shapes))
    if not checked:
        raise ValueError(f"{of_two_shapes[0]}; no pair is left to measure")
    if errors:
        logger.warning("%s; pairs that are measured without their mask: %d", errors[0], len(errors))
    return checked


def checksum_of_pairs(pairs):
    """Checksum of the pairs' images and texts."""
    total = hashlib.sha256()
    for pair in pairs:
        texts = [pair.index, pair.instruction, pair.original_caption, pair.edited_caption]
        total.update(json.dumps(texts).encode())
        for data in (pair.original, pair.edited):
            total.update(hashlib.sha256(data or b"").digest())
    return total.hexdigest()[:16]


def checksum_of_masks(pairs):
    """Checksum of the pairs' masks; None without masks."""
    if all(pair.mask is None for pair in pairs):
        return None
    total = hashlib.sha256()
    for pair in pairs:
        total.update(hashlib.sha256(pair.mask or b"").digest())
    return total.hexdigest()[:16]


def require_masks(pairs, sizes):
    """Raise a ValueError if no pair has a mask, or a mask has no white at the edit's size."""
    if all(pair.mask is None for pair in pairs):
        raise ValueError("--use_masks: no pair has a mask; give masks, or leave the flag out")
    for pair, size in zip(pairs, sizes):
        mask = pair.fitted_mask(size)
        if mask is not None and not mask.getbbox():
            raise ValueError(
                f"--use_masks: the mask of {pair.input} has no white at the size of the edit, "
                f"{size[0]}x{size[1]} (width x height); paint a larger part white"
            )


def left_out(pairs, clip_model):
    """The metrics that pairs and flags do not allow, one sentence each.

    Raises:
        ValueError: nothing can be measured.
    """
    num_pairs, sentences = len(pairs), []
    num_edited = sum(pair.edited is not None for pair in pairs)
    num_captions = sum(pair.edited_caption is not None for pair in pairs)
    num_both = sum(None not in (pair.original_caption, pair.edited_caption) for pair in pairs)
    num_masks = sum(pair.mask is not None for pair in pairs)
    if not clip_model:
        if not num_edited:
            raise ValueError(
                'no metric is possible: the pairs have no "truth" and --clip_model is ""; give one '
                "of the two"
            )
        sentences.append(f'left out, as --clip_model is "": {", ".join(CLIP_METRICS)}')
    similarity = ", truth_similarity" if clip_model else ""
    needs = [("truth", num_edited, f"l1, mse, error_ratio{similarity}")]
    if num_masks:
        needs.append(("mask", num_masks, "the metrics inside and outside of the mask"))
    if clip_model:
        needs.append(("both captions", num_both, "direction_similarity"))
        needs.append(("the caption of the truth", num_captions, "text_similarity"))
    for requirement, number, metrics in needs:
        if number < num_pairs:
            which = f"{num_pairs - number} of {num_pairs}" if number else "all"
            sentences.append(f"left out for {which} pairs, without {requirement}: {metrics}")
    return sentences
