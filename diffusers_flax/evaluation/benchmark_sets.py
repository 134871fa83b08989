"""Sets of benchmarks as held-out pairs, with the names that their own evaluation gives results.

    pairs = read_benchmark(config)
    pairs = add_final_turns(check_pairs(pairs, False))

MagicBrush: the folder of its test (edit_sessions.json, images/SESSION/FILE and, for CLIP-T,
local_descriptions.json), its dev shards (img_id, turn_index), or a list, in which an edit whose
input is the truth of another follows it. Emu Edit: its shards, or a list. GEdit-Bench: its shards,
parquet or Arrow. ImgEdit-Bench: a folder with basic_edit.json and the images that it names.
"""

import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.shards import read_beside, shard_files
from diffusers_flax.data.streaming import is_remote
from diffusers_flax.evaluation.held_out import HeldOutPair, pairs_of_jsonl
from diffusers_flax.loading.files import read_json
from diffusers_flax.messages import one_line

# The captions of the paper's CLIP-T: what is at the edited place (arXiv 2306.10012, section 4.1).
SESSIONS, CAPTIONS = "edit_sessions.json", "local_descriptions.json"
FINAL, INTERSECTION = "_final", "_intersection"  # parts, see evaluation/protocols.py
FINAL_INDEX = 1 << 30  # added to the index of an edit of a result
# Columns of shards: the fields of HeldOutPair, or "" for what is read otherwise
MAGICBRUSH_COLUMNS = {
    "source_img": "original",
    "instruction": "instruction",
    "target_img": "edited",
    "img_id": "session",
    "turn_index": "turn",
    "mask_img": "mask",
}
EMU_EDIT_COLUMNS = {
    "image": "original",
    "instruction": "instruction",
    "input_caption": "original_caption",
    "output_caption": "edited_caption",
    "task": "group",
}
GEDIT_COLUMNS = {
    "input_image_raw": "original",
    "instruction": "instruction",
    "task_type": "group",
    "key": "key",
    "instruction_language": "",
    "Intersection_exist": "",
}
OPTIONAL = {"mask_img", "input_caption", "output_caption", "task", "Intersection_exist"}
IMGEDIT_LIST = "basic_edit.json"
FILE_NAME = re.compile(r"[\w-]+")


def read_benchmark(config):
    """The pairs of --data_dir or --pairs_jsonl for --protocol, in the benchmark's order.

    Args:
        config: Config of evaluate_edits.py.

    Returns:
        List of HeldOutPair.

    Raises:
        ValueError: a file cannot be read, or lacks something, or an edit is there twice.
    """
    protocol, folder = config.protocol, Path(config.data_dir)
    given = f"--data_dir {config.data_dir}"
    if is_remote(config.data_dir):
        raise ValueError(f"{given} is not streamed with --protocol; download it first")
    if config.data_dir and not folder.is_dir():
        raise ValueError(f"{given} is not a directory; name the set's")
    if config.pairs_jsonl and protocol not in ("magicbrush", "emu_edit"):
        raise ValueError(f"--protocol {protocol} reads --data_dir, not --pairs_jsonl")
    if config.pairs_jsonl:
        pairs = pairs_of_jsonl(config.pairs_jsonl, config.max_pairs)
        pairs = chained(pairs) if protocol == "magicbrush" else pairs
    elif protocol == "magicbrush":
        has_list = (folder / SESSIONS).is_file()
        pairs = magicbrush_test(folder) if has_list else magicbrush_shards(folder)
    elif protocol == "emu_edit":
        pairs = (pair for _, pair in pairs_of_columns(folder, EMU_EDIT_COLUMNS))
    elif protocol == "gedit":
        pairs = gedit_shards(folder, config.instruction_language)
    else:
        pairs = imgedit_folder(folder)
    pairs = [replace(x, index=i) for i, x in enumerate(islice(pairs, config.max_pairs))]
    if not pairs:
        raise ValueError(f"{given} has no edit for --protocol {protocol}")
    for key, count in Counter(pair.key for pair in pairs if pair.key).items():
        if count > 1:
            raise ValueError(
                f"{given} has {key} {count} times; its results would overwrite each other: name a "
                "folder with the set once"
            )
    return pairs


def result_key(session, turn, is_final=False):
    """Name of a result as MagicBrush's evaluation looks for it: SESSION/SESSION_inde_2."""
    ending = "1" if turn == 1 else f"{'iter' if is_final else 'inde'}_{turn}"
    return f"{session}/{session}_{ending}"


def add_final_turns(pairs):
    """MagicBrush's turns, and after them the edits of results that lead to the final turns.

    Args:
        pairs: turns in the order of their sessions; each edits the true image of the turn before.

    Returns:
        List of HeldOutPair. The last turn of a session counts as final: of one turn, the pair
        itself, else a pair that edits the result of the turn before. Its original image is the
        session's first: a model that copies its input gives that. A session that lacks a turn has
        none.
    """
    turns_of = defaultdict(dict)
    for place, pair in enumerate(pairs):
        turns_of[pair.session][pair.turn] = place
    result = list(pairs)
    for session, turns in turns_of.items():
        last = max(turns)
        if sorted(turns) != list(range(1, last + 1)):
            continue
        first = pairs[turns[1]]
        if last == 1:
            result[turns[1]] = replace(first, parts=("", FINAL))
        before = turns[1]
        for turn in range(2, last + 1):
            pair = replace(
                pairs[turns[turn]],
                # Noise of its own, whichever other sessions there are
                index=FINAL_INDEX + pairs[turns[turn]].index,
                original=first.original,
                original_caption=first.original_caption,
                key=result_key(session, turn, is_final=True),
                after=before,
                parts=(FINAL,) if turn == last else (),
            )
            before = len(result)
            result.append(pair)
    return result


def magicbrush_test(folder):
    """The pairs of MagicBrush's test folder, one after another; all have index 0."""
    captions = read_captions(folder)
    for session, turns in read_json(folder / SESSIONS).items():
        images, place = folder / "images" / session, f"{folder / SESSIONS}: session {session}"
        require_file_name(session, place)
        for turn, entry in enumerate(turns if isinstance(turns, list) else [None], start=1):
            before, after, instruction = texts_of(entry, ("input", "output", "instruction"), place)
            mask = None
            if entry.get("mask"):
                mask = b""  # as if it were damaged, which only matters if edits need it
                with suppress(ValueError):
                    mask = read_listed(images, entry["mask"], place)
            yield HeldOutPair(
                index=0,
                input=str(images / before),
                instruction=instruction,
                original=read_listed(images, before, place),
                edited=read_listed(images, after, place),
                edited_caption=captions[session].get(after),
                mask=mask,
                key=result_key(session, turn),
                session=session,
                turn=turn,
            )


def read_captions(folder):
    """{session: {file of the true image: caption}} of CAPTIONS; empty without the file."""
    file = folder / CAPTIONS
    return defaultdict(dict, read_json(file) if file.is_file() else {})


def magicbrush_shards(folder):
    """The pairs of MagicBrush's shards, of the dev set, as magicbrush_test yields them."""
    captions = read_captions(folder)
    for _, pair in pairs_of_columns(folder, MAGICBRUSH_COLUMNS):
        session, turn = str(pair.session), pair.turn
        require_file_name(session, pair.input)
        caption, key = (
            captions[session].get(f"{session}-output{turn}.png"),
            result_key(session, turn),
        )
        yield replace(pair, session=session, edited_caption=caption, key=key)


def chained(pairs):
    """Pairs of a list with sessions: a pair whose original is another's edited image follows it."""
    named, last = [], {}
    for pair in pairs:
        before = last.pop(pair.original, None)
        session = f"{len(named):06d}" if before is None else before.session
        turn = 1 if before is None else before.turn + 1
        named.append(replace(pair, session=session, turn=turn, key=result_key(session, turn)))
        if pair.edited is not None:
            last[pair.edited] = named[-1]
    return named


def gedit_shards(folder, language):
    """The edits of GEdit-Bench in a language, "en" or "cn", one after another."""
    for row, pair in pairs_of_columns(folder, GEDIT_COLUMNS):
        if row["instruction_language"] == language:
            require_file_name(pair.group, pair.input)
            require_file_name(pair.key, pair.input)
            key = f"fullset/{pair.group}/{language}/{pair.key}"
            parts = ("", INTERSECTION) if row["Intersection_exist"] else ("",)
            yield replace(pair, key=key, parts=parts)


def imgedit_folder(folder):
    """The edits of ImgEdit-Bench's basic suite, one after another.

    The list is {key: {"id", "prompt", "edit_type"}}; id is an image's path in the list's folder or
    in one of the folders in it.
    """
    file = folder / IMGEDIT_LIST
    if not file.is_file():
        raise ValueError(
            f"--data_dir {folder} has no {IMGEDIT_LIST}; copy it there from Benchmark/Basic of "
            "github.com/PKU-YuanGroup/ImgEdit, beside the images of Benchmark.tar"
        )
    roots = [folder, *sorted(x for x in folder.iterdir() if x.is_dir())]
    for key, entry in read_json(file).items():
        place = f"{file}: {key}"
        require_file_name(key, place)
        image, instruction, group = texts_of(entry, ("id", "prompt", "edit_type"), place)
        root = next((x for x in roots if (x / image).is_file()), folder)
        data = read_listed(root, image, place)
        yield HeldOutPair(0, str(root / image), instruction, data, key=key, group=group)


def require_file_name(text, place):
    """Raise a ValueError if a text of a set cannot be part of a file's name."""
    if not FILE_NAME.fullmatch(str(text)):
        raise ValueError(f"{place}: {text!r} cannot name a file")


def texts_of(entry, names, place):
    """The texts of a JSON object by their names; a ValueError names one that it lacks."""
    for name in names:
        if not isinstance(entry, dict) or not isinstance(entry.get(name), str) or not entry[name]:
            raise ValueError(f"{place} lacks the text {name!r}")
    return [entry[name] for name in names]


def read_listed(folder, path, place):
    """The bytes of an image that a set names; errors begin with the place of its name."""
    try:
        return read_beside(folder, path)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def pairs_of_columns(folder, columns):
    """The pairs of all shards of a directory, parquet or Arrow.

    Args:
        folder: of *.parquet or *.arrow files.
        columns: {name: field of HeldOutPair, or ""}.

    Yields:
        ({column: value}, HeldOutPair with index 0) of each row with image and instruction.

    Raises:
        ValueError: there are no shards, they cannot be read, or lack a column.
    """
    if not (files := shard_files(folder) or sorted(folder.glob("[!.]*.arrow"))):
        raise ValueError(
            f"--data_dir {folder} contains no *.parquet or *.arrow file; name the shards' folder"
        )
    for path in files:
        try:
            table = read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read: {one_line(error, 200)}") from error
        for name in columns.keys() - OPTIONAL:
            if name not in table.column_names:
                raise ValueError(
                    f"{path} has no column {name}; it has {', '.join(table.column_names)}: name "
                    "the shards of the set that --protocol says"
                )
        table = table.select([name for name in columns if name in table.column_names])
        rows = (row for batch in table.to_batches(16) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            place = f"{path} row {number}"
            row = {name: encoded(row.get(name), path, place) for name in columns}
            given = {field: row[name] for name, field in columns.items() if field and row[name]}
            pair = HeldOutPair(
                **{"index": 0, "input": place, "instruction": "", "original": b""} | given
            )
            if pair.original and pair.instruction:
                yield row, pair


def read_table(path):
    """The pyarrow Table of a shard; an Arrow shard is a stream, as `datasets` writes, or a file."""
    if path.suffix == ".parquet":
        return pq.ParquetFile(path).read()
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source).read_all()


def encoded(cell, path, place):
    """A cell; of an image {"bytes", "path"} its bytes. path: of the shard; place: of the row."""
    if not isinstance(cell, dict):
        return cell
    if cell.get("bytes") or not cell.get("path"):
        return cell.get("bytes")
    return read_listed(path.parent, cell["path"], place)
