"""Public sets of edits: the columns of their shards, the keys of their indexes, their licences.

    find_set(row)  # of an index; nearest_set(names, given) of the columns of a shard

docs/data.md and docs/edit-sets.md say what was read on a card and what was inferred from public
code that reads the set. Nothing here opens a file.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from diffusers_flax.data.lists import NAMES

LISTS = (list, tuple)
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
    original_archive: str = ""  # that has the original image, if the index says so
    edited_archive: str = ""  # likewise, and the mask
    folder: str = ""  # that the paths are relative to, if the index says so


class KnownSet(NamedTuple):
    """A set that needs no flags, in shards or as an index with archives."""

    name: str  # on the hub, and for the direction of its pairs
    licence: str = ""  # on its card; "": not stated
    columns: tuple[str, str, str] | None = None  # in the order of COLUMN_FLAGS; None: no shards
    has_masks: bool = False  # in shards
    keys: frozenset[str] = frozenset()  # that every row of its index has
    pairs: Callable[[dict, str], Iterator[IndexedPair]] | None = None  # of (row, stem of its file)
    sources: str = ""  # what to do first if the original images are not there


def first(value):
    """The first of a list, or the value."""
    return next(iter(value), None) if isinstance(value, LISTS) else value


def second(value):
    """The second of a list, or None."""
    return value[1] if isinstance(value, LISTS) and len(value) > 1 else None


def by_keys(**keys: str) -> Callable[[dict, str], Iterator[IndexedPair]]:
    """The function of a set with one pair a row.

    Args:
        **keys: field of IndexedPair: key of the index. An image may be a list; the second image of
            the original is the reference. `instructions` is a key with further instructions.
    """
    more = keys.pop("instructions", None)

    def pairs(row: dict, stem: str) -> Iterator[IndexedPair]:
        values = {field: row.get(key) for field, key in keys.items()}
        others = row.get(more) or []
        texts = [values["instruction"], *([others] if isinstance(others, str) else others)]
        values["instruction"] = tuple(dict.fromkeys(filter(None, texts)))
        values.setdefault("reference", second(values["original"]))
        values |= {field: first(values[field]) for field in ("original", "edited")}
        values |= {field: value or "" for field, value in values.items() if "archive" in field}
        yield IndexedPair(**values)

    return pairs


def indexed(name: str, licence: str = "", **keys: str) -> KnownSet:
    """A set with one pair a row of its index; keys: of by_keys."""
    required = (keys[field] for field in ("original", "edited", "instruction"))
    return KnownSet(name, licence, keys=frozenset(required), pairs=by_keys(**keys))


def imgedit_turns(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The turns of ImgEdit; each names its input, which may be an earlier result."""
    single = by_keys(original="input_images", edited="output_images", instruction="prompt")
    for turn in row["data"]:
        yield from single(turn, stem)


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
    prompts = row["metadata_edit_turn_prompts"]
    for number, prompt in enumerate(prompts, start=1):
        name = f"edit_turn{number}"
        if name not in files and number == len(prompts):
            name = "final_image"
        yield IndexedPair(current, files[name]["url"], (prompt,))
        current = files[name]["url"]


def seed_turns(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The turns of SEED-Data-Edit, part 3; each edits the result of the turn before."""
    current, number = row["source_image"], 1
    while prompt := row.get(f"instruction_{number}"):
        result = row[f"edit_image_{number}"]
        yield IndexedPair(current, result, (prompt,))
        current, number = result, number + 1


GPT_FOLDERS = {  # of the training JSON of GPT-Image-Edit
    "hqedit_gpt_edit": "hqedit/edit",
    "hqedit_gpt_generate": "hqedit/generate",
    "omniedit_gpt": "omniedit",
    "omniedit_gpt_rewrite": "omniedit",
    "complexedit_gpt": "omniedit/complex-edit",
    "ultraedit_gpt": "ultraedit",
}


def gpt_image_edit(row: dict, stem: str) -> Iterator[IndexedPair]:
    """A row of the dataset's metadata: paths are relative to a folder for each source and task."""
    folder = "/".join(filter(None, (row["dataset_source"], row.get("task"))))
    yield IndexedPair(
        row["input"],
        row["output"],
        (row["instruction"],),
        original_prompt=row.get("input_description"),
        folder=folder,
    )


def gpt_conversations(row: dict, stem: str) -> Iterator[IndexedPair]:
    """A row of the training JSON: a list of images, and the instruction after <image>."""
    if not isinstance(row["image"], list):
        raise ValueError("image is not a list of an input and a result")
    *inputs, result = row["image"]
    asked = next(turn["value"] for turn in row["conversations"] if turn["from"] == "human")
    yield IndexedPair(
        first(inputs),
        result,
        (re.sub(r"\s*<image>\s*", " ", asked).strip(),),
        reference=second(inputs),
        folder=GPT_FOLDERS.get(stem, ""),
    )


WORDS = {  # of a sample's file names in WebDataset, and of an unknown index: meaning
    "original": (*NAMES["original_image"], "source", "source_image", "src", "before", "1.0"),
    "edited": (*NAMES["edited_image"], "output", "target", "target_image", "result", "after", "2"),
    "mask": NAMES["mask"],
    "reference": ("reference", "reference_image", "ref", "visual_input", "1.1"),
    "instruction": (*NAMES["edit_prompt"], "edit_instruction", "prompt", "text"),
    "original_prompt": NAMES["original_prompt"],
    "edited_prompt": NAMES["edited_prompt"],
}
MEANINGS = {word: meaning for meaning, words in WORDS.items() for word in words}


@lru_cache(maxsize=1000)
def known_words(keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """(key, meaning) of the keys in WORDS, the preferred ones first."""
    return [(word, meaning) for word, meaning in MEANINGS.items() if word in keys]


def by_words(row: dict, stem: str) -> Iterator[IndexedPair]:
    """The pair of a row whose keys are words of WORDS; of lists as columns, all pairs."""
    values = {}
    for word, meaning in known_words(tuple(row)):
        if row[word] not in (None, "", []):
            values.setdefault(meaning, row[word])
    columns = [values.get(name) for name in ("original", "edited", "instruction")]
    lengths = {len(x) if isinstance(x, LISTS) else 1 for x in columns}
    if len(lengths) == 1 and (n := lengths.pop()) > 1:
        for i in range(n):
            one = {k: x[i] if isinstance(x, LISTS) and len(x) == n else x for k, x in row.items()}
            yield from by_words(one, stem)
        return
    values.setdefault("reference", second(values.get("original")))
    texts = values.get("instruction")
    values["instruction"] = tuple(texts) if isinstance(texts, LISTS) else (texts,)
    values |= {field: first(values.get(field)) for field in ("original", "edited")}
    yield IndexedPair(**values)


SHOULD_MAP = (
    "the set has its source images by URL only: download train_0.tar.gz and train_1.tar.gz of Open "
    "Images and run map_openimage_url_to_local.py of github.com/apple/pico-banana-400k, or "
    "download the URLs into a directory beside the index"
)
NHR, IMGEDIT, SEED = "iitolstykh/NHR-Edit", "sysuyy/ImgEdit", "AILab-CVC/SEED-Data-Edit"
PICO = "apple/pico-banana-400k"
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
    KnownSet("osunlp/MagicBrush", "CC-BY-4.0", ("source_img", "target_img", "instruction"), True),
    KnownSet(
        "BleachNick/UltraEdit", "CC-BY-4.0", ("source_image", "edited_image", "edit_prompt"), True
    ),
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
    KnownSet(
        "BryanW/HumanEdit", "CC-BY-4.0", ("INPUT_IMG", "OUTPUT_IMG", "EDITING_INSTRUCTION"), True
    ),
    KnownSet(NHR, "Apache-2.0", ("source_image", "edited_image", "edit_instruction")),
    indexed(
        NHR,
        "Apache-2.0",
        original="source_file_name",
        edited="edited_file_name",
        instruction="edit_instruction",
        instructions="augmented_instructions",
    ),
    KnownSet(f"{IMGEDIT}, several turns", "MIT", keys=frozenset({"data"}), pairs=imgedit_turns),
    indexed(
        IMGEDIT,
        "MIT",
        original="input_images",
        edited="output_images",
        instruction="prompt",
        mask="mask",
    ),
    KnownSet(
        f"{PICO}, several turns",
        "CC-BY-NC-ND-4.0",
        keys=frozenset({"files", "metadata_edit_turn_prompts"}),
        pairs=pico_turns,
        sources=SHOULD_MAP,
    ),
    KnownSet(
        PICO,
        "CC-BY-NC-ND-4.0",
        keys=frozenset({"open_image_input_url", "text", "output_image"}),
        pairs=pico_banana,
        sources=SHOULD_MAP,
    ),
    KnownSet(
        f"{SEED}, several turns",
        "CC-BY-NC-4.0",
        keys=frozenset({"source_image", "instruction_1", "edit_image_1"}),
        pairs=seed_turns,
    ),
    KnownSet(
        SEED,
        "CC-BY-NC-4.0",
        keys=frozenset({"source_image", "target_image", "instruction"}),
        pairs=by_words,  # other sets with these keys have masks
    ),
    indexed(
        "a1557811266/Inter-Edit-Train",
        original="source_file",
        edited="target_file",
        instruction="instruction",
        mask="mask_file",
        original_archive="source_archive",
        edited_archive="asset_archive",
    ),
    indexed(
        "FreedomIntelligence/ShareGPT-4o-Image",
        original="input_image",
        edited="output_image",
        instruction="input_prompt",
    ),
    KnownSet(
        "UCSC-VLAA/GPT-Image-Edit-1.5M",
        "CC-BY-4.0",
        keys=frozenset({"dataset_source", "input", "output", "instruction"}),
        pairs=gpt_image_edit,
    ),
    KnownSet(
        "UCSC-VLAA/gpt-image-edit-training",
        "CC-BY-4.0",
        keys=frozenset({"image", "conversations"}),
        pairs=gpt_conversations,
    ),
)
FORBIDDEN = {"NC": "commercial use", "ND": "sharing of changed copies"}


def forbids(licence: str) -> str:
    """What a Creative Commons licence forbids, in words; "": nothing."""
    parts = licence.split("-")
    return " and ".join(text for short, text in FORBIDDEN.items() if short in parts)


def find_set(row: dict) -> KnownSet | None:
    """The set of a row of an index; None: it has no keys that are known."""
    turn = first(row.get("data"))
    has_turns = isinstance(turn, dict) and "input_images" in turn  # data is a common key
    for known in KNOWN_SETS:
        if known.keys and known.keys <= row.keys() and (known.pairs != imgedit_turns or has_turns):
            return known
    meanings = {MEANINGS.get(key) for key in row}
    if {"original", "edited", "instruction"} <= meanings:
        return KnownSet("", pairs=by_words)
    return None


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

    return max((known for known in KNOWN_SETS if known.columns), key=fit)


def set_of_columns(columns: tuple[str, str, str]) -> KnownSet:
    """The known set with these columns, or one without a name."""
    return next((known for known in KNOWN_SETS if known.columns == columns), KnownSet(""))
