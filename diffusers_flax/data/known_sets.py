"""Public sets of edits: the columns of their shards, the keys of their indexes, their licences.

    find_set(row)  # of an index; nearest_set(names, given) of the columns of a shard

docs/data.md and docs/edit-sets.md say what was read on a card and what was inferred from public
code that reads the set. Nothing here opens a file.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from diffusers_flax.data.lists import NAMES

COLUMN_FLAGS = ("original_image_column", "edited_image_column", "edit_prompt_column")


class IndexedPair(NamedTuple):
    """A pair as an index describes it; paths are as written there."""

    original: str
    edited: str
    instruction: tuple[str, ...]  # one, or several to draw from
    mask: str | dict | None = None  # path, or run lengths, see archives/masks.py
    reference: str | None = None  # second input image
    original_prompt: str | None = None
    edited_prompt: str | None = None


class KnownSet(NamedTuple):
    """A set that needs no flags, in shards."""

    name: str  # on the hub, and for the direction of its pairs
    licence: str = ""  # on its card; "": not stated
    columns: tuple[str, str, str] = ()  # in the order of COLUMN_FLAGS


class KnownIndex(NamedTuple):
    """A set that comes as an index with archives or image files."""

    name: str  # on the hub, and for the kind of its rows; "": not known
    licence: str  # on its card; "": not stated
    keys: tuple[str, ...]  # that every row has
    pairs: Callable[[dict, str], Iterator[IndexedPair]]  # of (row, stem of the index)
    has_whole_paths: bool = False  # they begin with a folder or archive of the set


def as_list(value: Any) -> list:
    """A list as it is, None as none, another value as one."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


WORDS = {  # of keys of an index, and of a sample's file names in WebDataset: meaning
    "original": (
        *NAMES["original_image"],
        *("input_images", "source", "source_image", "source_file_name", "src", "before", "1.0"),
    ),
    "edited": (
        *NAMES["edited_image"],
        *("output_images", "output", "target", "target_image", "edited_file_name", "result"),
        *("after", "2"),
    ),
    "mask": NAMES["mask"],
    "reference": (*NAMES["reference_image"], "ref", "visual_input", "1.1"),
    "instruction": (*NAMES["edit_prompt"], "edit_instruction", "prompt", "input_prompt", "text"),
    "more_instructions": ("augmented_instructions",),
    "original_prompt": NAMES["original_prompt"],
    "edited_prompt": NAMES["edited_prompt"],
}
MEANINGS = {word: meaning for meaning, words in WORDS.items() for word in words}


def by_words(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The pair of a row whose keys are in WORDS.

    An image may be a list; the second original image is the reference.
    """
    values = {}
    for word, meaning in MEANINGS.items():  # the preferred ones first
        if row.get(word) not in (None, "", []):
            values.setdefault(meaning, row[word])
    originals, edited, texts = map(as_list, map(values.get, ("original", "edited", "instruction")))
    texts += as_list(values.pop("more_instructions", None))
    values["instruction"] = tuple(dict.fromkeys(texts))
    values |= {"original": originals[0], "edited": edited[0]}
    values.setdefault("reference", (*originals, None)[1])
    yield IndexedPair(**values)


def imgedit_turns(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The turns of ImgEdit; each names its input, which may be an earlier result."""
    for turn in row["data"]:
        yield from by_words(turn, stem)


def pico_source(row: dict, url: str | None) -> str | None:
    """The original image of Pico-Banana: the local file if it was mapped, else the URL."""
    return row.get("local_input_image") or row.get("original_input_image_file") or url


def pico_banana(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The pair of a row of sft.jsonl, which has a long and a short instruction."""
    texts = tuple(filter(None, (row.get("text"), row.get("summarized_text"))))
    yield IndexedPair(pico_source(row, row["open_image_input_url"]), row["output_image"], texts)


def pico_turns(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The turns of a row of multi-turn.jsonl; each edits the result of the turn before."""
    files = {file["id"]: file for file in row["files"]}
    source = files["original_input_image"]
    current = row.get("local_input_image") or pico_source(source, source.get("url"))
    for number, prompt in enumerate(row["metadata_edit_turn_prompts"], start=1):
        result = files.get(f"edit_turn{number}") or files["final_image"]
        yield IndexedPair(current, result["url"], (prompt,))
        current = result["url"]


def seed_turns(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The turns of SEED-Data-Edit, part 3; each edits the result of the turn before."""
    current, number = row["source_image"], 1
    while prompt := row.get(f"instruction_{number}"):
        result = row[f"edit_image_{number}"]
        yield IndexedPair(current, result, (prompt,))
        current, number = result, number + 1


def inter_edit(row: dict, stem: str) -> Iterator[IndexedPair]:
    """A row of Inter-Edit, which names an archive and its member."""
    original = f"{row['source_archive']}/{row['source_file']}"
    edited = f"{row['asset_archive']}/{row['target_file']}"
    mask = row.get("mask_file") and f"{row['asset_archive']}/{row['mask_file']}"
    yield IndexedPair(original, edited, (row["instruction"],), mask)


GPT_FOLDERS = {  # of the training JSON of GPT-Image-Edit
    "hqedit_gpt_edit": "hqedit/edit/",
    "hqedit_gpt_generate": "hqedit/generate/",
    "omniedit_gpt": "omniedit/",
    "omniedit_gpt_rewrite": "omniedit/",
    "complexedit_gpt": "omniedit/complex-edit/",
    "ultraedit_gpt": "ultraedit/",
}


def gpt_metadata(row: dict, stem: str) -> Iterator[IndexedPair]:
    """A row of the dataset's metadata: paths are relative to a folder for each source and task."""
    folder = "/".join(filter(None, (row["dataset_source"], row.get("task"))))
    images = (f"{folder}/{row[key]}" for key in ("input", "output"))
    caption = row.get("input_description")
    yield IndexedPair(*images, (row["instruction"],), original_prompt=caption)


def gpt_conversations(row: dict, stem: str) -> Iterator[IndexedPair]:
    """A row of the training JSON: a list of images, and the instruction after <image>."""
    original, *more = [GPT_FOLDERS.get(stem, "") + path for path in row["image"]]
    asked = next(turn["value"] for turn in row["conversations"] if turn["from"] == "human")
    text = re.sub(r"\s*<image>\s*", " ", asked).strip()
    yield IndexedPair(original, more[-1], (text,), reference=(*more[:-1], None)[0])


NHR, IMGEDIT, SEED = "iitolstykh/NHR-Edit", "sysuyy/ImgEdit", "AILab-CVC/SEED-Data-Edit"
PICO, NC, ND = "apple/pico-banana-400k", "CC-BY-NC-4.0", "CC-BY-NC-ND-4.0"
INTER, SHARE = "a1557811266/Inter-Edit-Train", "FreedomIntelligence/ShareGPT-4o-Image"
GPT, GPT_TRAINING = "UCSC-VLAA/GPT-Image-Edit-1.5M", "UCSC-VLAA/gpt-image-edit-training"
X2EDIT = KnownSet("OPPOer/X2Edit-Dataset", "Apache-2.0")  # known by the names of its files
# Of several sets that fit equally well, the first is chosen.
KNOWN_SETS = (
    KnownSet(
        "timbrooks/instructpix2pix-clip-filtered",
        columns=("original_image", "edited_image", "edit_prompt"),
    ),
    KnownSet(
        "fusing/instructpix2pix-1000-samples",
        columns=("input_image", "edited_image", "edit_prompt"),
    ),
    KnownSet("osunlp/MagicBrush", "CC-BY-4.0", ("source_img", "target_img", "instruction")),
    KnownSet("BleachNick/UltraEdit", "CC-BY-4.0", ("source_image", "edited_image", "edit_prompt")),
    KnownSet("UCSC-VLAA/HQ-Edit", "CC-BY-NC-4.0", ("input_image", "output_image", "edit")),
    KnownSet(
        "UCSC-VLAA/HQ-Edit, inverse",
        "CC-BY-NC-4.0",
        ("output_image", "input_image", "inverse_edit"),
    ),
    KnownSet(
        "TIGER-Lab/OmniEdit-Filtered-1.2M", "MIT", ("src_img", "edited_img", "edited_prompt_list")
    ),
    KnownSet("Bin1117/AnyEdit", "CC-BY-4.0", ("image_file", "edited_file", "edit_instruction")),
    KnownSet("BryanW/HumanEdit", "CC-BY-4.0", ("INPUT_IMG", "OUTPUT_IMG", "EDITING_INSTRUCTION")),
    KnownSet(NHR, "Apache-2.0", ("source_image", "edited_image", "edit_instruction")),
)
INDEXES = (
    KnownIndex(NHR, "Apache-2.0", ("source_file_name", "edited_file_name"), by_words),
    KnownIndex(f"{IMGEDIT}, several turns", "MIT", ("data.input_images",), imgedit_turns),
    KnownIndex(IMGEDIT, "MIT", ("input_images", "output_images", "prompt"), by_words),
    KnownIndex(f"{PICO}, several turns", ND, ("metadata_edit_turn_prompts",), pico_turns),
    KnownIndex(PICO, ND, ("open_image_input_url", "text", "output_image"), pico_banana),
    KnownIndex(f"{SEED}, several turns", NC, ("source_image", "instruction_1"), seed_turns),
    KnownIndex(SEED, NC, ("source_image", "target_image", "instruction"), by_words),
    KnownIndex(INTER, "", ("source_archive", "asset_archive"), inter_edit, has_whole_paths=True),
    KnownIndex(SHARE, "", ("input_image", "output_image", "input_prompt"), by_words),
    KnownIndex(GPT, "CC-BY-4.0", ("dataset_source", "output"), gpt_metadata, has_whole_paths=True),
    KnownIndex(
        *(GPT_TRAINING, "CC-BY-4.0", ("image", "conversations"), gpt_conversations),
        has_whole_paths=True,
    ),
)
FORBIDDEN = {"NC": "commercial use", "ND": "sharing of changed copies"}


def forbids(licence: str) -> str:
    """What a Creative Commons licence forbids, in words; "": nothing."""
    parts = licence.split("-")
    return " and ".join(text for short, text in FORBIDDEN.items() if short in parts)


def find_set(row: dict) -> KnownIndex | None:
    """The set of a row of an index; None: it has no keys that are known."""
    keys = {*row}
    for turn in as_list(row.get("data"))[:1]:
        keys |= {f"data.{key}" for key in turn} if isinstance(turn, dict) else set()
    meanings = {MEANINGS.get(key) for key in row}
    if known := next((known for known in INDEXES if keys.issuperset(known.keys)), None):
        return known
    is_known = {"original", "edited", "instruction"} <= meanings
    return KnownIndex("", "", (), by_words) if is_known else None


def nearest_set(names: list[str], given: tuple[str, str, str]) -> KnownSet:
    """The known set with the most columns in common with a shard.

    Args:
        names: the shard's columns.
        given: columns that the user names, in the order of COLUMN_FLAGS; "": none.
    """

    def fit(known: KnownSet) -> tuple[int, int]:
        """(number of columns that the shard has, number of them that the user names)."""
        own = [(flag or column) in names for flag, column in zip(given, known.columns)]
        return sum(own), sum(map(str.__eq__, given, known.columns))

    return max(KNOWN_SETS, key=fit)


def set_of_columns(columns: tuple[str, str, str]) -> KnownSet:
    """The known set with these columns, or one without a name."""
    return next((known for known in KNOWN_SETS if known.columns == columns), KnownSet(""))
