"""Sets of benchmarks as held-out pairs, with the names that their own evaluation gives results.

    pairs = read_benchmark("magicbrush", Path("MagicBrush/test"))

MagicBrush: the folder of its test (edit_sessions.json, images/SESSION/FILE and, for CLIP-T,
local_descriptions.json), or its dev shards. Emu Edit: its shards. GEdit-Bench: its shards, parquet
or Arrow. ImgEdit-Bench: a folder with basic_edit.json and the images that it names.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.shards import read_beside
from diffusers_flax.evaluation.held_out import HeldOutPair
from diffusers_flax.loading.files import read_json

# The captions of the paper's CLIP-T: what is at the edited place (arXiv 2306.10012, section 4.1).
SESSIONS, CAPTIONS = "edit_sessions.json", "local_descriptions.json"
FINAL, INTERSECTION = "_final", "_intersection"  # parts, see evaluation/protocols.py
FINAL_INDEX = 1 << 30  # added to the index of an edit of a result
KEY = re.compile(r"[\w-]+(/[\w-]+)*")  # names of results


def read_benchmark(protocol, folder, max_pairs=None, language="en"):
    """The pairs of a benchmark's set, in its order; of MagicBrush see add_final_turns.

    Args:
        protocol: a key of PROTOCOLS.
        folder: Path of the set.
        max_pairs: number of pairs to read; None: all.
        language: of GEdit-Bench's instructions, "en" or "cn".

    Returns:
        List of HeldOutPair.

    Raises:
        ValueError: a file cannot be read or lacks something, or an edit is there twice.
    """
    readers = {
        "magicbrush": magicbrush_pairs,
        "emu_edit": emu_edit_pairs,
        "gedit": partial(gedit_pairs, language=language),
        "imgedit": imgedit_pairs,
    }
    try:
        pairs = islice(readers[protocol](folder), max_pairs)
        pairs = [replace(pair, index=i) for i, pair in enumerate(pairs)]
    except (KeyError, OSError, pa.ArrowException) as error:
        raise ValueError(
            f"--data_dir {folder} is not the set of --protocol {protocol}: {error!r}"
        ) from error
    if not pairs:
        raise ValueError(f"--data_dir {folder} has no edit for --protocol {protocol}")
    for key, count in Counter(pair.key for pair in pairs if pair.key).items():
        if count > 1 or not KEY.fullmatch(key):
            raise ValueError(f"--data_dir {folder} has {key!r} {count} times; name the set once")
    return add_final_turns(pairs) if protocol == "magicbrush" else pairs


def result_key(session, turn, setting):
    """Name of a result for MagicBrush's evaluation; setting: "inde", or "iter" for final turns."""
    if turn == 1:
        return f"{session}/{session}_1"
    return f"{session}/{session}_{setting}_{turn}"


def add_final_turns(pairs):
    """MagicBrush's turns, and after them the edits of results that lead to the final turns.

    Args:
        pairs: turns in the order of their sessions; each edits the true image of the turn before.

    Returns:
        List of HeldOutPair. The last turn of a session counts as final: of one turn, the pair
        itself, else a pair that edits the result of the turn before. Its original image is the
        session's first: a model that copies its input gives that.
    """
    last = {pair.session: place for place, pair in enumerate(pairs)}
    result, before = list(pairs), {}  # {session: place of the result that its next turn edits}
    for place, pair in enumerate(pairs):
        is_final = place == last[pair.session]
        after = before.get(pair.session)
        if after is None:
            before[pair.session] = place
            if is_final:
                result[place] = replace(pair, parts=("", FINAL))
            continue
        before[pair.session] = len(result)
        pair = replace(
            pair,
            index=FINAL_INDEX + pair.index,  # noise of its own, whichever other sessions there are
            original=result[after].original,
            key=result_key(pair.session, pair.turn, "iter"),
            after=after,
            parts=(FINAL,) if is_final else (),
        )
        result.append(pair)
    return result


def magicbrush_pairs(folder):
    """Yield the pairs of MagicBrush's test folder or dev shards."""
    captions = read_json(folder / CAPTIONS) if (folder / CAPTIONS).is_file() else {}
    rows = rows_of_sessions(folder) if (folder / SESSIONS).is_file() else rows_of_shards(folder)
    for place, row in rows:
        session, turn = str(row["img_id"]), row["turn_index"]
        output = row.get("output", f"{session}-output{turn}.png")
        yield HeldOutPair(
            0,
            place,
            row["instruction"],
            row["source_img"],
            row["target_img"],
            edited_caption=captions.get(session, {}).get(output),
            mask=row.get("mask_img"),
            key=result_key(session, turn, "inde"),
            session=session,
            turn=turn,
        )


def rows_of_sessions(folder):
    """Yield (name, row) of MagicBrush's test folder, with the columns of its shards."""
    columns = {"input": "source_img", "output": "target_img", "mask": "mask_img"}
    for session, turns in read_json(folder / SESSIONS).items():
        images = folder / "images" / session
        for turn, entry in enumerate(turns, start=1):
            row = {"img_id": session, "turn_index": turn} | entry
            for name in filter(entry.get, columns):
                row[columns[name]] = read_beside(images, entry[name])
            yield f"{images} turn {turn}", row


def emu_edit_pairs(folder):
    """Yield the pairs of Emu Edit's shards."""
    for place, row in rows_of_shards(folder):
        texts = (row.get(name) or None for name in ("input_caption", "output_caption"))
        yield HeldOutPair(0, place, row["instruction"], row["image"], None, *texts)


def gedit_pairs(folder, language):
    """Yield the edits of GEdit-Bench in a language, "en" or "cn"."""
    for place, row in rows_of_shards(folder):
        if row["instruction_language"] == language:
            key = f"fullset/{row['task_type']}/{language}/{row['key']}"
            parts = ("", INTERSECTION) if row.get("Intersection_exist") else ("",)
            pair = HeldOutPair(0, place, row["instruction"], row["input_image_raw"], key=key)
            yield replace(pair, group=row["task_type"], parts=parts)


def imgedit_pairs(folder):
    """Yield the edits of ImgEdit-Bench's basic suite, with images in the folder or below it."""
    roots = [folder, *sorted(x for x in folder.iterdir() if x.is_dir())]
    for key, entry in read_json(folder / "basic_edit.json").items():
        root = next((x for x in roots if (x / entry["id"]).is_file()), folder)
        place, image = str(root / entry["id"]), read_beside(root, entry["id"])
        yield HeldOutPair(0, place, entry["prompt"], image, key=key, group=entry["edit_type"])


def rows_of_shards(folder):
    """Yield (name, row) of the rows of parquet or Arrow shards; an image is its bytes."""
    for file in sorted(x for x in folder.glob("[!.]*") if x.suffix in (".parquet", ".arrow")):
        if file.suffix == ".parquet":
            batches = pq.ParquetFile(file).iter_batches(16)
        else:  # a stream, as `datasets` writes it
            batches = pa.ipc.open_stream(pa.memory_map(str(file)))
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            for name, cell in row.items():
                row[name] = cell["bytes"] if isinstance(cell, dict) else cell
            yield f"{file} row {number}", row
