"""Write shards from an index with archives or from WebDataset's archives.

    report = convert_archives(Path("downloads"), Path("data"), PairsFlags())

Headers of all archives are read, gzipped archives are unpacked into the output directory, then
every pair's files are read in the order of the archives, by position. The same command after a kill
goes on after the last complete shard.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from diffusers_flax.data.archives.flags import PairsFlags
from diffusers_flax.data.archives.index import is_index, read_rows
from diffusers_flax.data.archives.pairs import (
    IMAGES,
    Plan,
    PlannedPair,
    leave_out,
    make_plan,
    read_pairs,
)
from diffusers_flax.data.archives.source import Source, find_source
from diffusers_flax.data.archives.tar import NAME, Place
from diffusers_flax.data.faults import FaultFinder, measure
from diffusers_flax.data.known_sets import find_set, forbids
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.data.writing import (
    HELD_OUT_DIRS,
    IMAGE,
    MANIFEST,
    SCHEMA,
    check_directories,
    choose_held_out,
    image_suffix,
    own_shards,
    read_manifest,
    write_held_out,
    write_numbered_shards,
)
from diffusers_flax.loading.files import remove, write_text
from diffusers_flax.messages import first_names

BAD = ("not a pair", "a file is missing", "no instruction", "no whole sample", "damaged")


def is_archived(path: Path) -> bool:
    """Whether --pairs names an index with archives, and not a list of image files."""
    if path.is_dir():
        has_images = all((path / name).is_dir() for name in ("original", "edited"))
        return not (has_images and [*path.glob("captions.jsonl"), *path.glob("captions.csv")])
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return is_index(path) or bool(NAME.fullmatch(path.name))
    row = next((row for _, row in read_rows(path) if isinstance(row, dict)), {})
    known = find_set(row)
    has_archives = any(NAME.fullmatch(file.name) for file in path.parent.iterdir())
    if known is None or known.name or not has_archives:
        return bool(known and known.name)
    original = str(next(known.pairs(row, "")).original)
    return not any((folder / original).is_file() for folder in (path.parent, Path()))


def convert_archives(path: Path, output_dir: Path, options: PairsFlags) -> str:
    """Convert a set to shards, or continue with it.

    Args:
        path: directory, index or archive.
        output_dir: new or empty, or of the same conversion that was interrupted.
        options: flags of the program.

    Returns:
        A summary of a few lines.

    Raises:
        ValueError: there is nothing to convert, an archive is damaged or hostile, too many pairs
            cannot be used, or output_dir belongs to something else.
    """
    if not path.exists():
        raise ValueError(f"--pairs {path} does not exist; name an index, an archive or a directory")
    source, unfinished = find_source(path, output_dir), output_dir / UNFINISHED_DIR
    if any(x.resolve().is_relative_to(output_dir.resolve()) for x in source.paths()):
        raise ValueError(f"--output_dir {output_dir} has files of --pairs; name another")
    files = "".join(f"{file} {file.stat().st_size}\n" for file in source.paths())
    files = hashlib.sha256(files.encode(errors="replace")).hexdigest()
    conversion = {"pairs": str(path.resolve()), "files": files, "drop": [*options.drop]}
    names = ("max_pairs", "worker", "num_workers", "num_held_out", "held_out_dir", "seed")
    conversion |= {name: getattr(options, name) for name in names}
    if (manifest := read_manifest(output_dir)).get("conversion") == conversion:
        return f"{output_dir} is finished: {describe(manifest['files'])}"
    state = read_manifest(unfinished)
    if state and not state["files"]:
        remove(unfinished)
    if not state.get("files") or state["conversion"] != conversion:
        check_directories(output_dir, options)
        unfinished.mkdir(parents=True)
        state = {"conversion": conversion, "files": [], "next": 0}
        save(state, unfinished)
    return convert(source, output_dir, options, state)


def describe(files: list[dict]) -> str:
    """Numbers of pairs and shards."""
    total = sum(file["rows"] for file in files)
    return f"{total} pairs (shards: {len(files)}; {MANIFEST} lists them)"


def save(state: dict, folder: Path) -> None:
    """Write the manifest; in UNFINISHED_DIR it has what is written so far."""
    write_text(folder / MANIFEST, json.dumps(state, indent=1, ensure_ascii=False) + "\n")


def convert(source: Source, output_dir: Path, options: PairsFlags, state: dict) -> str:
    """Write the shards that are missing, and the manifest.

    Args:
        source, output_dir, options: of convert_archives.
        state: manifest so far, with "next", the number of the next pair.
    """
    unfinished = output_dir / UNFINISHED_DIR
    for line in source.ignored[:10]:
        print(f"not read    {line}")
    plan = make_plan(source, options.max_pairs)
    for name, licence in plan.sets.items():
        print(f"set         {name}, {licence or 'no licence on its card'}")
        if forbidden := forbids(licence):
            print(f"licence     {licence} forbids {forbidden}")
    if not plan.pairs:
        examples = [kept["examples"][0] for kept in plan.left_out.values()]
        raise ValueError(
            f"--pairs {source.root} has no pair that can be used; the first: "
            f"{(*examples, 'it has no rows')[0]}; name a directory that has index and archives"
        )
    check_bad(plan.left_out, len(plan.pairs), options)
    archives = sorted({pair.archive for pair in plan.pairs})
    archives = archives[options.worker or 0 :: options.num_workers or 1]
    pairs, held_out = sorted(x for x in plan.pairs if x.archive in archives), []
    source, lines, hashes = unpack(source, pairs, unfinished), [], set()
    if options.num_held_out:
        is_held_out = choose_held_out(keys_of(plan), options.num_held_out, options.seed)
        held_out = [x for x in pairs if is_held_out[x.number]]
        pairs = [x for x in pairs if not is_held_out[x.number]]
        lines.append(hold_out(source, held_out, hashes, options))
    state.setdefault("left_out", plan.left_out)
    state |= {"sets": plan.sets, "not_read": [*source.ignored, *plan.unnamed]}
    write_pairs(source, plan, pairs, hashes, options, state, unfinished)
    if not state["files"]:
        raise ValueError(f"--pairs {source.root}: no pair is left, so there is no shard")

    new = {file["file"] for file in state["files"]}
    for file in own_shards(output_dir):
        if file.name not in new:
            remove(file)
    for name in new:
        if (unfinished / name).exists():  # else an interrupted start has moved it
            (unfinished / name).rename(output_dir / name)
    del state["next"]
    save(state, output_dir)
    remove(unfinished)
    lines.insert(0, f"{output_dir} has {describe(state['files'])}")
    if plan.unnamed:
        text = f"{len(plan.unnamed)} archives with files that no index here names: "
        lines.append(f"not read    {text}{first_names(plan.unnamed)}")
    for reason, found in state["left_out"].items():
        lines.append(f"left out    {found['count']} pairs: {reason}")
        lines += [f"            {name}" for name in found["examples"][:3]]
    return "\n".join(lines)


def unpack(source: Source, pairs: list[PlannedPair], folder: Path) -> Source:
    """A source whose gzipped archives with files of some pairs are unpacked to a directory."""
    used = {x.archive for pair in pairs for x in pair.record.values() if isinstance(x, Place)}
    archives = [*source.archives]
    for number in tqdm(sorted(used - {0}), "opening archives", disable=None):
        if archives[number - 1].is_gzipped:
            archives[number - 1] = archives[number - 1].unpack(folder / f"{number}.tar")
    return source._replace(archives=archives)


def check_bad(left_out: dict, num_pairs: int, options: PairsFlags) -> None:
    """Raise a ValueError if too many rows and pairs are bad; num_pairs: without these."""
    found = [left_out[reason] for reason in BAD if reason in left_out]
    bad = sum(kept["count"] for kept in found)
    if bad > options.max_bad_fraction * (num_pairs + bad):
        raise ValueError(
            f"{bad} of {num_pairs + bad} pairs cannot be used, more than --max_bad_fraction "
            f"{options.max_bad_fraction}; for example {found[-1]['examples'][-1]}"
        )


def keys_of(plan: Plan) -> list[tuple]:
    """The keys of all pairs for choose_held_out: places of images; turns of a row go together."""
    keys, before = [], ""
    for pair in plan.pairs:
        row, turn, _ = pair.name.rpartition(" turn ")
        keys.append((pair.record["original"], pair.record["edited"], bool(turn) and row == before))
        before = row
    return keys


def images_of(row: dict) -> tuple[bytes, bytes]:
    """The original and the edited image of a row."""
    return row["original_image"]["bytes"], row["edited_image"]["bytes"]


def hold_out(
    source: Source, pairs: list[PlannedPair], hashes: set[bytes], options: PairsFlags
) -> str:
    """Write the pairs that are held out, and add hashes of their original images; a summary."""

    def images_and_texts() -> Iterator[tuple[dict, dict]]:
        for _, row in read_pairs(source, pairs):
            if isinstance(row, ValueError) or {*measure(*images_of(row)).faults} & {*options.drop}:
                continue
            hashes.add(hashlib.sha256(row["original_image"]["bytes"]).digest())
            cells = {role: row[f"{role}_image"] for role in HELD_OUT_DIRS}
            data = {role: cell["bytes"] for role, cell in cells.items() if cell}
            images = {role: (image_suffix(x), x) for role, x in data.items()}
            yield images, row | {"edit_prompt": row["edit_prompt"][0]}

    held_out_dir = Path(options.held_out_dir)
    remove(held_out_dir / UNFINISHED_DIR)  # of a start that was killed here
    return write_held_out(images_and_texts(), held_out_dir)


def write_pairs(
    source: Source,
    plan: Plan,
    pairs: list[PlannedPair],
    held_out: set[bytes],
    options: PairsFlags,
    state: dict,
    unfinished: Path,
) -> None:
    """Write pairs to shards, from the first one that is in no complete shard on.

    Args:
        source, plan, options: of the conversion.
        pairs: sorted.
        held_out: hashes of original images of which no pair is written.
        state: of convert; changed in place.
        unfinished: directory for the shards.
    """
    schema, has_lists = SCHEMA, "instructions" in plan.columns
    if has_lists:
        index = SCHEMA.get_field_index("edit_prompt")
        schema = SCHEMA.set(index, pa.field("edit_prompt", pa.list_(pa.string())))
    for role in ("mask", "reference"):
        if role in plan.columns:
            schema = schema.append(pa.field(f"{role}_image", IMAGE))
    archives = sorted({pair.archive for pair in pairs} - {0})
    names = " ".join(source.archives[archive - 1].name for archive in archives)
    stem = f"train-{hashlib.sha256(names.encode()).hexdigest()[:6]}"  # another one on each host
    finder, start = FaultFinder(), state["next"]
    first = 0 if options.drop else start  # --drop compares with all pairs before

    def reason_against(row: dict) -> str:
        if options.drop:
            text = "\n".join(row["edit_prompt"])
            found = finder.find(measure(*images_of(row)), text, options.drop)
            if faults := [fault for fault in found if fault in options.drop]:
                return f"--drop {faults[0]}"
        if held_out and hashlib.sha256(row["original_image"]["bytes"]).digest() in held_out:
            return "its original image is held out"
        return ""

    def rows() -> Iterator[tuple[dict, int]]:
        found = read_pairs(source, pairs[first:])
        bar = tqdm(found, "writing shards", len(pairs), unit="pair", initial=first, disable=None)
        for number, (planned, row) in enumerate(bar, start=first):
            is_damaged = isinstance(row, ValueError)
            reason = "damaged" if is_damaged else reason_against(row)
            if number < start:
                continue
            state["next"] = number
            if reason:
                text = f"{planned.name}: {row}" if is_damaged else planned.name
                leave_out(state["left_out"], reason, text)
                check_bad(state["left_out"], len(pairs), options)
                continue
            cells = (row[f"{role}_image"] for role in IMAGES)
            num_bytes = sum(len(cell["bytes"]) for cell in cells if cell)
            texts = row["edit_prompt"]
            yield row | {"edit_prompt": texts if has_lists else texts[0]}, num_bytes
        state["next"] = len(pairs)

    name = stem + "-{:05d}.parquet"
    for file, num_rows in write_numbered_shards(
        rows(), unfinished, schema, name, len(state["files"])
    ):
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        entry = {"file": file.name, "size": file.stat().st_size, "sha256": digest}
        state["files"].append(entry | {"rows": num_rows})
        save(state, unfinished)
