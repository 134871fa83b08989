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
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.shards import read_beside, shard_files
from diffusers_flax.data.streaming import is_remote
from diffusers_flax.evaluation.held_out import Columns, HeldOutPair, pairs_of_jsonl, pairs_of_shards
from diffusers_flax.loading.files import read_json
from diffusers_flax.messages import one_line

# The captions of the paper's CLIP-T: what is at the edited place (arXiv 2306.10012, section 4.1).
SESSIONS, CAPTIONS = "edit_sessions.json", "local_descriptions.json"
FINAL, INTERSECTION = "_final", "_intersection"  # parts, see evaluation/protocols.py
FINAL_INDEX = 1 << 30  # added to the index of an edit of a result
TURN = ("input", "output", "instruction", "mask")  # of MagicBrush; the last is optional
EMU_EDIT_COLUMNS = ("image", "instruction", "input_caption", "output_caption", "task")
GEDIT_COLUMNS = (
    *("input_image_raw", "instruction", "task_type", "key", "instruction_language"),
    "Intersection_exist",  # optional
)
IMGEDIT_LIST = "basic_edit.json"
NAME = re.compile(r"[\w-]+")  # of a session, in names of files


def read_benchmark(config):
    """The pairs of --data_dir or --pairs_jsonl for --protocol, in the benchmark's order.

    Args:
        config: Config of evaluate_edits.py.

    Returns:
        List of HeldOutPair.

    Raises:
        ValueError: a file cannot be read, or lacks something, or an edit is there twice.
    """
    pairs = pairs_of_benchmark(config)
    counts = Counter(pair.key for pair in pairs if pair.key)
    if twice := [key for key, number in counts.items() if number > 1]:
        raise ValueError(
            f"--data_dir {config.data_dir} has {twice[0]} {counts[twice[0]]} times; its results "
            "would overwrite each other: name a folder with the set once"
        )
    return pairs


def pairs_of_benchmark(config):
    """As read_benchmark, of edits that may be there twice."""
    limit = config.max_pairs
    if is_remote(config.data_dir):
        raise ValueError(
            f"--data_dir {config.data_dir} is not streamed with --protocol; download it, and name "
            "its directory"
        )
    if config.data_dir and not Path(config.data_dir).is_dir():
        raise ValueError(f"--data_dir {config.data_dir} is not a directory; name the set's")
    if config.protocol == "magicbrush":
        if config.pairs_jsonl:
            return chained(pairs_of_jsonl(config.pairs_jsonl, limit))
        folder = Path(config.data_dir)
        if (folder / SESSIONS).is_file():
            return magicbrush_test(folder, limit)
        return magicbrush_shards(folder, limit)
    if config.protocol == "emu_edit":
        if config.pairs_jsonl:
            return pairs_of_jsonl(config.pairs_jsonl, limit)
        return emu_edit_shards(Path(config.data_dir), limit)
    if config.pairs_jsonl:
        raise ValueError(f"--protocol {config.protocol} reads --data_dir, not --pairs_jsonl")
    if config.protocol == "gedit":
        return gedit_shards(Path(config.data_dir), config.instruction_language, limit)
    return imgedit_folder(Path(config.data_dir), limit)


def result_key(session, turn, is_final=False):
    """Name of a result as MagicBrush's evaluation looks for it: SESSION/SESSION_inde_2."""
    kind = "1" if turn == 1 else f"{'iter' if is_final else 'inde'}_{turn}"
    return f"{session}/{session}_{kind}"


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
        if last == 1:
            result[turns[1]] = replace(pairs[turns[1]], parts=("", FINAL))
        before = turns[1]
        for turn in range(2, last + 1):
            pair = replace(
                pairs[turns[turn]],
                # Noise of its own, whichever other sessions there are
                index=FINAL_INDEX + pairs[turns[turn]].index,
                original=pairs[turns[1]].original,
                original_caption=pairs[turns[1]].original_caption,
                key=result_key(session, turn, is_final=True),
                after=before,
                parts=(FINAL,) if turn == last else (),
            )
            before = len(result)
            result.append(pair)
    return result


def magicbrush_test(folder, limit=None):
    """The pairs of MagicBrush's test folder; limit: number of turns, None for all."""
    sessions, captions = read_json(folder / SESSIONS), read_captions(folder)
    pairs = []
    for session, turns in sessions.items():
        if not NAME.fullmatch(session):
            raise ValueError(f"{folder / SESSIONS}: {session} cannot name a session")
        if not isinstance(turns, list):
            raise ValueError(f"{folder / SESSIONS}: session {session} is no list of turns")
        for turn, entry in enumerate(turns, start=1):
            if len(pairs) == limit:
                return pairs
            place = f"{folder / SESSIONS}: turn {turn} of session {session}"
            entry = entry if isinstance(entry, dict) else {}
            before, after, instruction, mask = (
                x if isinstance(x := entry.get(name), str) else "" for name in TURN
            )
            for name, text in zip(TURN, (before, after, instruction)):
                if not text:
                    raise ValueError(f"{place} lacks the text {name!r}; it has {', '.join(entry)}")
            try:
                images = [read_beside(folder / "images" / session, x) for x in (before, after)]
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            data = None
            if mask:
                data = b""  # as if it were damaged, which only matters if edits need it
                with suppress(ValueError):
                    data = read_beside(folder / "images" / session, mask)
            pairs.append(
                HeldOutPair(
                    index=len(pairs),
                    input=str(folder / "images" / session / before),
                    instruction=instruction,
                    original=images[0],
                    edited=images[1],
                    edited_caption=captions[session].get(after),
                    mask=data,
                    key=result_key(session, turn),
                    session=session,
                    turn=turn,
                )
            )
    if not pairs:
        raise ValueError(f"{folder / SESSIONS} has no turns")
    return pairs


def read_captions(folder):
    """{session: {file of the true image: caption}} of CAPTIONS; empty without the file."""
    file, captions = folder / CAPTIONS, defaultdict(dict)
    for session, texts in read_json(file).items() if file.is_file() else ():
        if not isinstance(texts, dict) or not all(isinstance(x, str) for x in texts.values()):
            raise ValueError(f"{file}: session {session} has no object of file names and captions")
        captions[session] = texts
    return captions


def magicbrush_shards(folder, limit=None):
    """The pairs of MagicBrush's shards, of the dev set; captions as for magicbrush_test."""
    sessions, turns = [], []
    for path in shard_files(folder):
        try:
            columns = pq.read_schema(path).names
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read: {one_line(error, 200)}") from error
        if not {"img_id", "turn_index"} <= set(columns):
            raise ValueError(
                f"{path} has no columns img_id and turn_index, which say what follows what; it has "
                f"{', '.join(columns)}: name a directory with {SESSIONS} or MagicBrush's shards, "
                "or give --pairs_jsonl"
            )
        table = pq.read_table(path, columns=["img_id", "turn_index"])
        sessions += map(str, table["img_id"].to_pylist())
        turns += table["turn_index"].to_pylist()
    captions, named = read_captions(folder), []
    for pair in pairs_of_shards(folder, Columns(mask=""), max_pairs=limit):
        session, turn = sessions[pair.index], turns[pair.index]
        if not NAME.fullmatch(session) or not isinstance(turn, int) or turn < 1:
            raise ValueError(f"{pair.input}: img_id {session}, turn_index {turn} are no turn")
        named.append(
            replace(
                pair,
                edited_caption=captions[session].get(f"{session}-output{turn}.png"),
                key=result_key(session, turn),
                session=session,
                turn=turn,
            )
        )
    return named


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


def emu_edit_shards(folder, limit=None):
    """The pairs of Emu Edit's shards, without edited images."""
    pairs = []
    for name, row in rows_of_shards(folder, EMU_EDIT_COLUMNS):
        if len(pairs) == limit:
            break
        image, instruction, before, after, task = row
        if image and instruction:
            pairs.append(
                HeldOutPair(
                    index=len(pairs),
                    input=name,
                    instruction=instruction,
                    original=image,
                    original_caption=before or None,
                    edited_caption=after or None,
                    group=task or "",
                )
            )
    if not pairs:
        raise ValueError(f"--data_dir {folder} has no row with an image and an instruction")
    return pairs


def gedit_shards(folder, language, limit=None):
    """The edits of GEdit-Bench in a language, "en" or "cn"."""
    pairs = []
    for name, row in rows_of_shards(folder, GEDIT_COLUMNS, required=len(GEDIT_COLUMNS) - 1):
        if len(pairs) == limit:
            break
        image, instruction, task, key, language_of_row, in_both = row
        if language_of_row != language:
            continue
        if not all(isinstance(x, str) and NAME.fullmatch(x) for x in (task, key)):
            raise ValueError(f"{name}: task_type {task} and key {key} cannot name files")
        if not image or not instruction:
            raise ValueError(f"{name} has no image or no instruction")
        result = f"fullset/{task}/{language}/{key}"
        parts = ("", INTERSECTION) if in_both else ("",)
        pair = HeldOutPair(len(pairs), name, instruction, image, key=result, group=task)
        pairs.append(replace(pair, parts=parts))
    if not pairs:
        raise ValueError(f"--data_dir {folder} has no row in the language {language}")
    return pairs


def imgedit_folder(folder, limit=None):
    """The edits of ImgEdit-Bench's basic suite: {key: {"id", "prompt", "edit_type"}} and images.

    The images are in the list's folder or in one of the folders in it.
    """
    file = folder / IMGEDIT_LIST
    if not file.is_file():
        raise ValueError(
            f"--data_dir {folder} has no {IMGEDIT_LIST}; copy it there from Benchmark/Basic of "
            "github.com/PKU-YuanGroup/ImgEdit, beside the images of Benchmark.tar"
        )
    pairs, roots = [], [folder, *sorted(x for x in folder.iterdir() if x.is_dir())]
    for key, entry in read_json(file).items():
        if len(pairs) == limit:
            break
        place = f"{file}: {key}"
        try:
            image, instruction, kind = (entry[name] for name in ("id", "prompt", "edit_type"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{place} lacks {error}; it has id, prompt and edit_type") from error
        if not NAME.fullmatch(key) or not all(
            isinstance(x, str) and x for x in (image, instruction, kind)
        ):
            raise ValueError(f"{place} cannot name a file, or id, prompt or edit_type is no text")
        root = next((x for x in roots if (x / image).is_file()), folder)
        try:
            data = read_beside(root, image)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        path = str(root / image)
        pairs.append(HeldOutPair(len(pairs), path, instruction, data, key=key, group=kind))
    if not pairs:
        raise ValueError(f"{file} has no edits")
    return pairs


def rows_of_shards(folder, columns, required=2):
    """Rows of all shards of a directory, parquet or Arrow.

    Args:
        folder: of *.parquet or *.arrow files.
        columns: names; the first is of the image.
        required: number of columns that must exist; the values of others are None.

    Yields:
        (name of the row, list of the columns' values; images are bytes).

    Raises:
        ValueError: there are no shards, they cannot be read, or lack a required column.
    """
    if not (files := shard_files(folder) or sorted(folder.glob("[!.]*.arrow"))):
        raise ValueError(
            f"--data_dir {folder} contains no *.parquet or *.arrow file; name the shards' folder"
        )
    for path in files:
        try:
            names, batches = open_shard(path, columns)
            if missing := [name for name in columns[:required] if name not in names]:
                raise ValueError(
                    f"{path} has no column {missing[0]}; it has {', '.join(names)}: name the "
                    "shards of the set that --protocol says"
                )
            number = 0
            for batch in batches:
                for row in batch.to_pylist():
                    name, number = f"{path} row {number}", number + 1
                    cells = [encoded(row.get(x), path, name) for x in columns]
                    for column, cell in zip(columns, cells):
                        kind = bytes if column == columns[0] else (str, bool)
                        if cell is not None and not isinstance(cell, kind):
                            what = "image" if kind is bytes else "text"
                            raise ValueError(f"{name}: {column} is no {what}: {str(cell)[:40]!r}")
                    yield name, cells
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {one_line(error, 200)}") from error


def open_shard(path, columns):
    """(names of its columns, iterator of batches with those of `columns` that exist)."""
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        wanted = [name for name in columns if name in names]
        return names, file.iter_batches(batch_size=16, columns=wanted)
    with open(path, "rb") as opened:
        is_file = opened.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    if is_file:
        reader = pa.ipc.open_file(source)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        reader = batches = pa.ipc.open_stream(source)  # as `datasets` writes
    names = reader.schema.names
    return names, (batch.select([x for x in columns if x in names]) for batch in batches)


def encoded(cell, path, name):
    """A cell; of an image {"bytes", "path"} its bytes. path: of the shard; name: of the row."""
    if not isinstance(cell, dict):
        return cell
    if cell.get("bytes") or not cell.get("path"):
        return cell.get("bytes")
    try:
        return read_beside(path.parent, cell["path"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
