"""Public sets that come as an index with archives: which keys of a row are what.

The tables say what a row's keys mean; nothing here opens a file. docs/edit-sets.md says what was
read on a card and what was inferred from public code that reads the set.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from diffusers_flax.data.lists import NAMES

LISTS = (list, tuple)


class Row(NamedTuple):
    """A pair as an index describes it; paths are as written there."""

    original: str
    edited: str
    instruction: tuple[str, ...]  # one, or several to draw from
    mask: str | dict | None = None  # path, or run lengths, see masks.py
    reference: str | None = None  # second input image
    original_prompt: str | None = None
    edited_prompt: str | None = None
    original_archive: str = ""  # that has the original image, if the index says so
    edited_archive: str = ""  # likewise, and the mask
    folder: str = ""  # that the paths are relative to, if the index says so


class IndexedSet(NamedTuple):
    """A set that is recognised by the keys of its rows."""

    name: str  # on the hub
    licence: str  # on its card; "": not stated
    keys: frozenset[str]  # that every row has
    rows: Callable[[dict, str], Iterator[Row]]  # (a row of the index, stem of its file) -> pairs
    sources: str = ""  # what to do first if the original images are not there


def first(value):
    """The first of a list, or the value."""
    return next(iter(value), None) if isinstance(value, LISTS) else value


def second(value):
    """The second of a list, or None."""
    return value[1] if isinstance(value, LISTS) and len(value) > 1 else None


def plain(**keys: str) -> Callable[[dict, str], Iterator[Row]]:
    """The function of a set with one pair a row.

    Args:
        **keys: field of Row: key of the index. An image may be a list; the second image of the
            original is the reference. `instructions` is a key with further instructions.
    """
    more = keys.pop("instructions", None)

    def rows(row: dict, stem: str) -> Iterator[Row]:
        values = {field: row.get(key) for field, key in keys.items()}
        if "reference" not in values:
            values["reference"] = second(values["original"])
        for field in ("original", "edited"):
            values[field] = first(values[field])
        others = row.get(more) or []
        texts = [values["instruction"], *([others] if isinstance(others, str) else others)]
        values["instruction"] = tuple(dict.fromkeys(text for text in texts if text))
        yield Row(**{k: v for k, v in values.items() if v is not None or k in Row._fields[:3]})

    return rows


def has_turns(row: dict) -> bool:
    """Whether `data`, a common key, has turns of ImgEdit."""
    turn = first(row["data"])
    return isinstance(turn, dict) and "input_images" in turn


def imgedit_turns(row: dict, stem: str) -> Iterator[Row]:
    """The turns of ImgEdit; each names its input, which may be an earlier result."""
    single = plain(original="input_images", edited="output_images", instruction="prompt")
    for turn in row["data"]:
        yield from single(turn, stem)


def pico_source(row: dict, url: str | None) -> str | None:
    """The original image of Pico-Banana: the local file if it was mapped, else the URL."""
    return row.get("local_input_image") or row.get("original_input_image_file") or url


def pico_banana(row: dict, stem: str) -> Iterator[Row]:
    """The pair of a row of sft.jsonl, which has a long and a short instruction."""
    texts = (row.get("text"), row.get("summarized_text"))
    yield Row(
        pico_source(row, row["open_image_input_url"]),
        row["output_image"],
        tuple(text for text in texts if text),
    )


def pico_turns(row: dict, stem: str) -> Iterator[Row]:
    """The turns of a row of multi-turn.jsonl; each edits the result of the turn before."""
    files = {file["id"]: file for file in row["files"]}
    source = files["original_input_image"]
    current = row.get("local_input_image") or pico_source(source, source.get("url"))
    prompts = row["metadata_edit_turn_prompts"]
    for number, prompt in enumerate(prompts, start=1):
        name = f"edit_turn{number}"
        if name not in files and number == len(prompts):
            name = "final_image"
        result = files[name]["url"]
        yield Row(current, result, (prompt,))
        current = result


def seed_turns(row: dict, stem: str) -> Iterator[Row]:
    """The turns of SEED-Data-Edit, part 3; each edits the result of the turn before."""
    current, number = row["source_image"], 1
    while prompt := row.get(f"instruction_{number}"):
        result = row[f"edit_image_{number}"]
        yield Row(current, result, (prompt,))
        current, number = result, number + 1


GPT_FOLDERS = {  # of the training JSON of GPT-Image-Edit
    "hqedit_gpt_edit": "hqedit/edit",
    "hqedit_gpt_generate": "hqedit/generate",
    "omniedit_gpt": "omniedit",
    "omniedit_gpt_rewrite": "omniedit",
    "complexedit_gpt": "omniedit/complex-edit",
    "ultraedit_gpt": "ultraedit",
}


def gpt_image_edit(row: dict, stem: str) -> Iterator[Row]:
    """A row of the dataset's metadata: paths are relative to a folder for each source and task."""
    folder = "/".join(filter(None, (row["dataset_source"], row.get("task"))))
    yield Row(
        row["input"],
        row["output"],
        (row["instruction"],),
        original_prompt=row.get("input_description"),
        folder=folder,
    )


def gpt_conversations(row: dict, stem: str) -> Iterator[Row]:
    """A row of the training JSON: a list of images, and the instruction after <image>."""
    if not isinstance(row["image"], list):
        raise ValueError("image is not a list of an input and a result")
    *inputs, result = row["image"]
    asked = next(turn["value"] for turn in row["conversations"] if turn["from"] == "human")
    yield Row(
        first(inputs),
        result,
        (re.sub(r"\s*<image>\s*", " ", asked).strip(),),
        reference=second(inputs),
        folder=GPT_FOLDERS.get(stem, ""),
    )


SHOULD_MAP = (
    "the set has its source images by URL only: download train_0.tar.gz and train_1.tar.gz of Open "
    "Images and run map_openimage_url_to_local.py of github.com/apple/pico-banana-400k, or "
    "download the URLs into a directory beside the index"
)
PICO, SEED = "apple/pico-banana-400k", "AILab-CVC/SEED-Data-Edit"
# The first whose keys a row has.
INDEXED_SETS = (
    IndexedSet("sysuyy/ImgEdit, several turns", "MIT", frozenset({"data"}), imgedit_turns),
    IndexedSet(
        "sysuyy/ImgEdit",
        "MIT",
        frozenset({"input_images", "output_images", "prompt"}),
        plain(original="input_images", edited="output_images", instruction="prompt", mask="mask"),
    ),
    IndexedSet(
        f"{PICO}, several turns",
        "CC-BY-NC-ND-4.0",
        frozenset({"files", "metadata_edit_turn_prompts"}),
        pico_turns,
        SHOULD_MAP,
    ),
    IndexedSet(
        PICO,
        "CC-BY-NC-ND-4.0",
        frozenset({"open_image_input_url", "text", "output_image"}),
        pico_banana,
        SHOULD_MAP,
    ),
    IndexedSet(
        f"{SEED}, several turns",
        "CC-BY-NC-4.0",
        frozenset({"source_image", "instruction_1", "edit_image_1"}),
        seed_turns,
    ),
    IndexedSet(
        SEED,
        "CC-BY-NC-4.0",
        frozenset({"source_image", "target_image", "instruction"}),
        lambda row, stem: any_index(row, stem),  # other sets with these keys have masks
    ),
    IndexedSet(
        "iitolstykh/NHR-Edit",
        "Apache-2.0",
        frozenset({"source_file_name", "edited_file_name", "edit_instruction"}),
        plain(
            original="source_file_name",
            edited="edited_file_name",
            instruction="edit_instruction",
            instructions="augmented_instructions",
        ),
    ),
    IndexedSet(
        "a1557811266/Inter-Edit-Train",
        "",
        frozenset({"source_file", "target_file", "mask_file", "instruction"}),
        plain(
            original="source_file",
            edited="target_file",
            instruction="instruction",
            mask="mask_file",
            original_archive="source_archive",
            edited_archive="asset_archive",
        ),
    ),
    IndexedSet(
        "FreedomIntelligence/ShareGPT-4o-Image",
        "",
        frozenset({"input_prompt", "input_image", "output_image"}),
        plain(original="input_image", edited="output_image", instruction="input_prompt"),
    ),
    IndexedSet(
        "UCSC-VLAA/GPT-Image-Edit-1.5M",
        "CC-BY-4.0",
        frozenset({"dataset_source", "input", "output", "instruction"}),
        gpt_image_edit,
    ),
    IndexedSet(
        "UCSC-VLAA/gpt-image-edit-training",
        "CC-BY-4.0",
        frozenset({"image", "conversations"}),
        gpt_conversations,
    ),
)
LICENCES = {  # of sets whose shards have images, on their cards
    **dict.fromkeys(("osunlp/MagicBrush", "BleachNick/UltraEdit"), "CC-BY-4.0"),
    **dict.fromkeys(("UCSC-VLAA/HQ-Edit", "UCSC-VLAA/HQ-Edit, inverse"), "CC-BY-NC-4.0"),
    **dict.fromkeys(("Bin1117/AnyEdit", "BryanW/HumanEdit"), "CC-BY-4.0"),
    "TIGER-Lab/OmniEdit-Filtered-1.2M": "MIT",
    "iitolstykh/NHR-Edit": "Apache-2.0",
}
X2EDIT = "OPPOer/X2Edit-Dataset"
FIRST_STEPS = {  # by the name on the hub in lower case: what else has to be downloaded
    "ucsc-vlaa/gpt-image-edit-1.5m": (
        "the set has its index in another repository; download it to the directory of the images: "
        "hf download UCSC-VLAA/gpt-image-edit-training --include 'training_json/*' --local-dir "
        "downloads"
    ),
    PICO.lower(): SHOULD_MAP,
}
# Of which the original and the edited image of a pair are in two archives.
SPREAD = frozenset({"a1557811266/inter-edit-train", PICO.lower()})
FORBIDDEN = {"NC": "commercial use", "ND": "sharing of changed copies"}

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


def forbids(licence: str) -> str:
    """What a Creative Commons licence forbids, in words; "": nothing."""
    parts = licence.split("-")
    return " and ".join(text for short, text in FORBIDDEN.items() if short in parts)


@lru_cache(maxsize=1000)
def known_words(keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """(key, meaning) of the keys in WORDS, the preferred ones first."""
    return [(word, meaning) for word, meaning in MEANINGS.items() if word in keys]


def any_index(row: dict, stem: str) -> Iterator[Row]:
    """The pair of a row of an unknown set, whose keys are words of WORDS; of columns all pairs."""
    values = {}
    for word, meaning in known_words(tuple(row)):
        if row[word] not in (None, "", []):
            values.setdefault(meaning, row[word])
    columns = [values.get(name) for name in ("original", "edited", "instruction")]
    lengths = {len(x) if isinstance(x, LISTS) else 1 for x in columns}
    if len(lengths) == 1 and (n := lengths.pop()) > 1:
        for i in range(n):
            one = {k: x[i] if isinstance(x, LISTS) and len(x) == n else x for k, x in row.items()}
            yield from any_index(one, stem)
        return
    values.setdefault("reference", second(values.get("original")))
    texts = values.get("instruction")
    values["instruction"] = tuple(texts) if isinstance(texts, LISTS) else (texts,)
    for field in ("original", "edited"):
        values[field] = first(values.get(field))
    yield Row(**values)


def find_set(row: dict) -> IndexedSet | None:
    """The set of a row; None: it has no keys that are known."""
    for known in INDEXED_SETS:
        if known.keys <= row.keys() and (known.rows != imgedit_turns or has_turns(row)):
            return known
    meanings = {MEANINGS.get(key) for key in row}
    if {"original", "edited", "instruction"} <= meanings:
        return IndexedSet("", "", frozenset(), any_index)
    return None


def split_name(name: str) -> tuple[str, str]:
    """Key and extension of a file in WebDataset: a/001.input.jpg is of a/001, input.jpg."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


@lru_cache(maxsize=1000)
def meaning_of(extension: str) -> str:
    """What a file of a WebDataset sample is: a field of Row, "text", "json" or ""."""
    if extension in ("txt", "json"):
        return {"txt": "text"}.get(extension, extension)
    word, _, kind = extension.rpartition(".")
    if kind == "txt":
        return MEANINGS.get(word, "")
    return MEANINGS.get(word, "") if word else ""
