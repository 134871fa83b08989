"""Write shards from an index with archives or from WebDataset's archives.

    report = convert_archives(Path("downloads"), Path("data"), Options())

Headers of all archives are read, then every pair's files in the order of the archives, by position.
The same command after a kill goes on after the last complete shard.
"""

import hashlib
import json
import shutil
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from diffusers_flax.data.archives.index import is_index, read_rows
from diffusers_flax.data.archives.names import NAME
from diffusers_flax.data.archives.pairs import (
    IMAGES,
    NO_FILES,
    LeftOut,
    Plan,
    PlannedPair,
    Reader,
    StoredPair,
    make_plan,
)
from diffusers_flax.data.archives.source import Source, find_source
from diffusers_flax.data.faults import FaultFinder, measure
from diffusers_flax.data.known_sets import find_set, forbids
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.data.writing import (
    COPIES,
    HELD_OUT,
    HELD_OUT_DIRS,
    HELD_OUT_LIST,
    IMAGE,
    MANIFEST,
    SCHEMA,
    ShardWriter,
    check_directory,
    choose_held_out,
    image_suffix,
    move_when_complete,
    read_manifest,
    write_held_out,
)
from diffusers_flax.loading.files import remove, write_text
from diffusers_flax.messages import differences, first_names, one_line

PROGRESS = "progress.json"  # in UNFINISHED_DIR
MAX_IGNORED = 5  # files that are printed as not read
DAMAGED = "damaged"
HELD_OUT_PAIRS = "held_out"  # in UNFINISHED_DIR


@dataclass(frozen=True)
class Options:
    """What is converted, and by whom."""

    max_pairs: int | None = None  # only the first N pairs; None: all
    worker: int = 0  # of num_workers that divide the archives among them
    num_workers: int = 1
    max_bad_fraction: float = 0.1  # of rows and pairs that cannot be used
    drop: tuple[str, ...] = ()  # names of faults.FAULTS; pairs with one are left out
    num_held_out: int = 0  # original images, which with all their pairs go to held_out_dir
    held_out_dir: Path | None = None
    seed: int = 0  # of the choice of images
    overwrite: bool = False  # replace earlier shards


def is_archived(path: Path) -> bool:
    """Whether --pairs names an index with archives, and not a list of image files."""
    if path.is_dir():
        has_images = all((path / name).is_dir() for name in ("original", "edited"))
        return not (has_images and [*path.glob("captions.jsonl"), *path.glob("captions.csv")])
    if not path.is_file() or path.suffix.lower() == ".csv":
        return False
    if path.suffix.lower() != ".jsonl":
        return is_index(path) or bool(NAME.fullmatch(path.name))
    row = next((row for _, row in read_rows(path) if isinstance(row, dict)), {})
    known = find_set(row)
    if known is None or known.name:
        return known is not None
    with suppress(ValueError, LookupError, TypeError, AttributeError, OSError):
        original = next(known.pairs(row, "")).original
        if any((folder / original).is_file() for folder in (path.parent, Path())):
            return False
    return any(NAME.fullmatch(file.name) for file in path.parent.iterdir())


def convert_archives(path: Path, output_dir: Path, options: Options = Options()) -> str:
    """Convert a set to shards, or continue with it.

    Args:
        path: directory, index or archive.
        output_dir: new or empty, or of the same conversion that was interrupted.
        options: see Options.

    Returns:
        A summary of a few lines.

    Raises:
        ValueError: there is nothing to convert, an archive is damaged or hostile, too many pairs
            cannot be used, or output_dir belongs to something else.
    """
    if not path.exists():
        raise ValueError(f"--pairs {path} does not exist; name an index, an archive or a directory")
    source = find_source(path, output_dir)
    check_apart(source, output_dir, options)
    given = asdict(options) | {"pairs": str(path.resolve()), "drop": [*options.drop]}
    del given["overwrite"], given["max_bad_fraction"]  # may change
    given["held_out_dir"] = options.held_out_dir and str(options.held_out_dir.resolve())
    given["files"] = source.stamp()
    unfinished = output_dir / UNFINISHED_DIR
    manifest = read_manifest(output_dir)
    changed = differences(manifest.get("conversion", {}), given)
    is_same = all(text.startswith("files was") for text in changed)
    if is_same and manifest and is_complete(manifest["files"], [output_dir]):
        if changed:
            raise ValueError(
                f"--output_dir {output_dir} has this conversion, but files of --pairs have come, "
                "gone or changed since; name another directory"
            )
        remove(unfinished)
        return f"{output_dir} is finished: {describe_files(manifest['files'])}"
    progress = {"conversion": given, "files": [], "next": 0, "left_out": None}
    if (unfinished / PROGRESS).exists():
        saved = json.loads((unfinished / PROGRESS).read_text())
        changed = differences(saved["conversion"], given)
        if not changed and is_complete(saved["files"], [unfinished, output_dir]):
            progress = saved
        elif saved["files"]:
            raise ValueError(
                f"--output_dir {output_dir} has another conversion that is not complete, or its "
                f"files have changed ({'; '.join(changed)}); go on with its flags and files, or "
                f"remove {unfinished}"
            )
    else:
        check_directory("output_dir", output_dir, options.overwrite)
    if not progress["files"]:
        remove(unfinished)  # maybe of another conversion, without a shard
        if options.num_held_out:
            check_directory("held_out_dir", options.held_out_dir, options.overwrite)
        unfinished.mkdir(parents=True)
        save_progress(progress, unfinished)
    return convert(source, output_dir, options, progress)


def check_apart(source: Source, output_dir: Path, options: Options) -> None:
    """Raise a ValueError for directories that are read and written."""
    for archive in source.archives:
        if any(part.resolve().is_relative_to(output_dir.resolve()) for part in archive.parts):
            raise ValueError(f"--output_dir {output_dir} has files of --pairs; name another")
    if held_out := options.held_out_dir:
        for other, flag in ((output_dir, "output_dir"), (source.root, "pairs")):
            if held_out.resolve().is_relative_to(other.resolve()):
                raise ValueError(f"--held_out_dir {held_out} is in --{flag} {other}; name another")


def is_complete(files: list[dict], folders: list[Path]) -> bool:
    """Whether each shard is in one of the directories as it was written."""
    return all(
        any(
            (x / file["file"]).is_file() and (x / file["file"]).stat().st_size == file["size"]
            for x in folders
        )
        for file in files
    )


def describe_files(files: list[dict]) -> str:
    """Numbers of pairs and shards."""
    total = sum(file["rows"] for file in files)
    return f"{total} pairs (shards: {len(files)}; {MANIFEST} lists them)"


def save_progress(progress: dict, unfinished: Path) -> None:
    """Save what is written so far."""
    write_text(unfinished / PROGRESS, json.dumps(progress, ensure_ascii=False))


def convert(source: Source, output_dir: Path, options: Options, progress: dict) -> str:
    """Write the shards that are missing, and the manifest; arguments as for convert_archives."""
    unfinished = output_dir / UNFINISHED_DIR
    plan = make_plan(source, options.max_pairs)
    announce(source, plan)
    check_left_out(plan, source, options)
    if progress["left_out"] is None:
        progress["left_out"] = plan.left_out.found
    archives = sorted({pair.archive for pair in plan.pairs})[options.worker :: options.num_workers]
    if not archives:
        raise ValueError(
            f"--num_workers {options.num_workers} is too many: --worker {options.worker} has no "
            "archive with pairs"
        )
    mine, held_out = {*archives}, []
    if options.num_held_out:
        chosen = choose_held_out(keys_of(plan), options.num_held_out, options.seed)
        held_out = [plan.pairs[n] for n in np.flatnonzero(chosen)]
    numbers = {pair.number for pair in held_out}
    held_out = [pair for pair in held_out if pair.archive in mine]
    pairs = sorted(x for x in plan.pairs if x.archive in mine and x.number not in numbers)
    save_held_out(source, held_out, options, unfinished / HELD_OUT_PAIRS)
    write_pairs(source, plan, pairs, options, progress, unfinished)
    if not progress["files"]:
        raise ValueError(f"--pairs {source.root}: no pair is left, so there is no shard")
    return finish(source, plan, output_dir, options, progress)


def announce(source: Source, plan: Plan) -> None:
    """Print what set it is, what its licence forbids, and what is not read."""
    for name, licence in plan.sets.items():
        told = "keys" if source.indexes else "file names"
        print(f"set         {name} by its {told}, {licence or 'no licence on its card'}")
        if forbidden := forbids(licence):
            print(f"licence     {licence} forbids {forbidden}")
    for line in source.ignored[:MAX_IGNORED]:
        print(f"not read    {line}")
    if more := source.ignored[MAX_IGNORED:]:
        print(f"not read    {len(more)} more files; {MANIFEST} will name them")


def check_left_out(plan: Plan, source: Source, options: Options) -> None:
    """Raise a ValueError if too few rows of the indexes are pairs."""
    found = {reason: kept for reason, kept in plan.left_out.found.items() if reason != NO_FILES}
    bad = sum(kept["count"] for kept in found.values())
    hints = [known.sources for _, known in source.indexes if known.sources]
    hints += ["download the index and the archives, and name a directory that has both"]
    if not plan.pairs:
        examples = [kept["examples"][0] for kept in plan.left_out.found.values()]
        ignored = f" (not read: {first_names(source.ignored)})" if source.ignored else ""
        raise ValueError(
            f"--pairs {source.root} has no pair that can be used{ignored}; the first: "
            f"{(*examples, 'it has no rows')[0]}; {hints[0]}"
        )
    if bad > options.max_bad_fraction * (len(plan.pairs) + bad):
        raise ValueError(
            f"{bad} of {len(plan.pairs) + bad} rows cannot be used, more than --max_bad_fraction "
            f"{options.max_bad_fraction}; for example {next(iter(found.values()))['examples'][0]}; "
            f"{hints[0]}"
        )


def keys_of(plan: Plan) -> list[tuple]:
    """The keys of all pairs for choose_held_out: places of images; turns of a row go together."""
    keys, before = [], ""
    for pair in plan.pairs:
        row, turn, _ = pair.name.rpartition(" turn ")
        keys.append((pair.record["original"], pair.record["edited"], bool(turn) and row == before))
        before = row if turn else ""
    return keys


def save_held_out(source: Source, pairs: list[PlannedPair], options: Options, folder: Path) -> None:
    """Write the pairs that are held out, unless an earlier start has."""
    if not pairs or (folder / HELD_OUT_LIST).exists():
        return
    remove(folder)
    folder.mkdir()
    with closing(Reader(source, sorted(pairs), folder)) as reader:
        stored = {pair.number: read_or_error(reader, pair) for pair in sorted(pairs)}
    good = [
        pair
        for pair in (stored[planned.number] for planned in pairs)
        if not isinstance(pair, ValueError)
        and not {*measure(*pair.images).faults} & {*options.drop}
    ]
    images = (
        {
            role: (image_suffix(pair.image(role)), pair.image(role))
            for role in HELD_OUT_DIRS
            if pair.cells[role]
        }
        for pair in good
    )
    texts = (pair.texts | {"edit_prompt": pair.texts["edit_prompt"][0]} for pair in good)
    write_held_out(zip(images, texts), folder)


def hashes_of(folder: Path) -> set[bytes]:
    """Hashes of the original images in a directory of held-out pairs."""
    return {hashlib.sha256(x.read_bytes()).digest() for x in folder.glob("original/*")}


def read_or_error(reader: Reader, pair: PlannedPair) -> StoredPair | ValueError:
    """A pair, or why it cannot be used."""
    try:
        return reader.read(pair)
    except ValueError as error:
        return error


def write_pairs(
    source: Source,
    plan: Plan,
    pairs: list[PlannedPair],
    options: Options,
    progress: dict,
    unfinished: Path,
) -> None:
    """Write pairs to shards, from the first one that is in no complete shard on.

    Args:
        source, plan, options: of the conversion.
        pairs: in their order.
        progress: files, number of the next pair, and what is left out; changed in place.
        unfinished: directory for the shards.
    """
    schema, left_out, start = SCHEMA, LeftOut(progress["left_out"]), progress["next"]
    if "instructions" in plan.columns:
        index = SCHEMA.get_field_index("edit_prompt")
        schema = SCHEMA.set(index, pa.field("edit_prompt", pa.list_(pa.string())))
    roles = [role for role in IMAGES if role in {*IMAGES[:2], *plan.columns}]
    for role in roles[2:]:
        schema = schema.append(pa.field(f"{role}_image", IMAGE))
    archives = sorted({pair.archive for pair in pairs} - {0})
    names = " ".join(source.archives[archive - 1].name for archive in archives)
    stem = f"train-{hashlib.sha256(names.encode()).hexdigest()[:6]}"  # another one on each host
    first = 0 if options.drop else start  # --drop compares with all pairs before
    finder = FaultFinder() if options.drop else None
    held_out = hashes_of(unfinished / HELD_OUT_PAIRS)

    def note_shard(file: Path, num_rows: int) -> None:
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        entry = {"file": file.name, "size": file.stat().st_size, "sha256": digest}
        progress["files"].append(entry | {"rows": num_rows})
        progress["next"] = number
        save_progress(progress, unfinished)

    with (
        closing(Reader(source, pairs[first:], unfinished)) as reader,
        ShardWriter(unfinished, schema, stem + "-{:05d}.parquet", note_shard) as writer,
    ):
        writer.number = len(progress["files"])
        for number, planned in enumerate(tqdm(pairs, "writing shards", unit="pair", disable=None)):
            if number < first:
                continue
            problem, pair = "", read_or_error(reader, planned)
            if isinstance(pair, ValueError):
                problem = DAMAGED
            elif finder and (faults := new_faults(finder, pair, options.drop)):
                problem = f"--drop {faults[0]}"
            elif held_out and hashlib.sha256(pair.image("original")).digest() in held_out:
                problem = "its original image is held out"
            if number < start:
                continue
            if problem:
                text = f": {one_line(pair, 200)}" if problem == DAMAGED else ""
                left_out.add(problem, planned.name + text)
                check_damaged(left_out, len(pairs), options)
            else:
                texts = pair.texts["edit_prompt"]
                row = pair.texts | {f"{role}_image": pair.cells[role] for role in roles}
                row["edit_prompt"] = texts if "instructions" in plan.columns else texts[0]
                writer.add(row, pair.size)
        number = len(pairs)


def new_faults(finder: FaultFinder, pair: StoredPair, drop: tuple[str, ...]) -> list[str]:
    """The faults of a pair that are to be left out; a pair without is remembered."""
    text, measured = "\n".join(pair.texts["edit_prompt"]), measure(*pair.images)
    faults = [fault for fault in finder.find(measured, text) if fault in drop]
    if not faults:
        finder.remember(measured, text)
    return faults


def check_damaged(left_out: LeftOut, num_pairs: int, options: Options) -> None:
    """Raise a ValueError if too many pairs are damaged."""
    damaged = left_out.found.get(DAMAGED, {"count": 0, "examples": [""]})
    if damaged["count"] > options.max_bad_fraction * num_pairs:
        raise ValueError(
            f"{damaged['count']} of {num_pairs} pairs are damaged, more than --max_bad_fraction "
            f"{options.max_bad_fraction}; for example {damaged['examples'][-1]}"
        )


def finish(source: Source, plan: Plan, output_dir: Path, options: Options, progress: dict) -> str:
    """Move shards and held-out pairs to their directories, write the manifest; the summary."""
    unfinished, files = output_dir / UNFINISHED_DIR, progress["files"]
    kept = {file["file"] for file in files}
    for old in read_manifest(output_dir).get("files", ()):
        if old["file"] not in kept:
            remove(output_dir / Path(old["file"]).name)
    lines = [f"{output_dir} has {describe_files(files)}"]
    if options.num_held_out and (unfinished / HELD_OUT_PAIRS).exists():
        held_out_dir = options.held_out_dir
        remove(held_out_dir / UNFINISHED_DIR)  # of a start that was killed here
        with move_when_complete(held_out_dir, HELD_OUT) as folder:
            for path in (unfinished / HELD_OUT_PAIRS).iterdir():
                shutil.move(path, folder / path.name)  # maybe to another disk
        edits = (held_out_dir / HELD_OUT_LIST).read_text().count("\n")
        lines.append(f"held out    {edits} pairs: {held_out_dir / HELD_OUT_LIST}; {COPIES}")
    elif options.num_held_out:
        lines.append("held out    0 pairs: no archive of this worker has one")
    content = {
        "sets": plan.sets,
        "conversion": progress["conversion"],
        "files": files,
        "left_out": dict(sorted(progress["left_out"].items())),
        "not_read": [*source.ignored, *plan.unnamed],
    }
    for file in files:
        if (unfinished / file["file"]).exists():
            (unfinished / file["file"]).rename(output_dir / file["file"])
    write_text(output_dir / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    remove(unfinished)
    if plan.unnamed:
        text = f"{len(plan.unnamed)} archives with files that no index here names: "
        lines.append(f"not read    {text}{first_names(plan.unnamed)}")
    for reason, found in content["left_out"].items():
        lines.append(f"left out    {found['count']} pairs: {reason}")
        lines += [f"            {name}" for name in found["examples"][:3]]
    return "\n".join(lines)
