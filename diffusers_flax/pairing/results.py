"""Finished pairs on disk: a file for each finished line of captions, shards for training.

    OUTPUT_DIR/make_pairs.json                       the flags and captions of the run
    OUTPUT_DIR/.unfinished/worker-0-of-1             until all shards of this worker are complete
    OUTPUT_DIR/.unfinished/line-000000012.parquet    pairs of a line, until its shard is complete
    OUTPUT_DIR/train-00000-of-00064.parquet          pairs of --lines_per_shard lines

A shard has the lines of a fixed part of the list, so that its content depends neither on the number
of workers nor on restarts. Metadata of the files have what is counted for the report.
"""

import errno
import json
import re
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from diffusers_flax.command_line import check_writable
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.data.writing import ROW_GROUP_BYTES, ROW_GROUP_ROWS, SCHEMA
from diffusers_flax.loading.files import (
    UNFINISHED_PREFIX,
    read_json,
    remove,
    save_whole,
    write_text,
)
from diffusers_flax.messages import warn_once
from diffusers_flax.pairing.samples import Sample
from diffusers_flax.pairing.scores import Scores, Thresholds, compared_scores

SETTINGS = "make_pairs.json"
COMMAND = "command"  # entry of SETTINGS that may differ between starts
NO_FLAGS = {"lines": "lines", "commit": "commit of --model on the hub"}  # entries of SETTINGS
METADATA = b"make_pairs"
LINE_FILE = r"line-(\d{9})\.parquet"  # the place of its line in the list
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of disks without locks
TRIES = 10  # to write into a directory that another worker removes when it is empty
PAIR_SCHEMA = pa.schema(
    [
        *SCHEMA,
        ("line", pa.int64()),
        ("sample", pa.int32()),
        ("guidance_scale", pa.float32()),
        ("attention_sharing", pa.float32()),
        *((name, pa.float32()) for name in Scores._fields),
    ]
)
BINS = np.linspace(-0.5, 1, 151)  # of the histograms; scores beyond them count at the ends


class MadePair(NamedTuple):
    """A sample with its images and scores.

    Fields:
        sample: Sample.
        scores: Scores; NaN if an image is NaN.
        images: (original, edited), files as bytes; None if they are NaN or nobody needs them.
    """

    sample: Sample
    scores: Scores
    images: tuple | None


class Choice(NamedTuple):
    """Which pairs of a line are kept.

    Fields:
        num_samples: that are made at most.
        num_kept: with the largest direction, of the good ones; None: all pairs, good or not.
        thresholds: of good pairs.
        stops_early: no more samples once num_kept are good; the first good ones are kept.
    """

    num_samples: int
    num_kept: int | None
    thresholds: Thresholds
    stops_early: bool = False


class Line:
    """The pairs of a line while they are made; counts them in the order of their numbers."""

    def __init__(self, choice):
        self.choice = choice
        self.arrived, self.num_seen = {}, 0  # those behind a gap wait in `arrived`
        self.kept, self.best = [], None  # best: the pair with the largest direction
        self.num_good, self.num_nan, self.missed = 0, 0, dict.fromkeys(Thresholds._fields, 0)
        self.histograms = np.zeros((len(Scores._fields), len(BINS) - 1), int)
        self.largest = np.full(len(Thresholds._fields), -1.0)

    @property
    def is_finished(self):
        """Whether no more samples are needed."""
        choice = self.choice
        is_enough = choice.stops_early and self.num_good == choice.num_kept
        return is_enough or self.num_seen == choice.num_samples

    def add(self, pair):
        """Add a pair, which counts when all pairs of smaller numbers are there.

        Returns:
            The number of pairs that count now.
        """
        before, number = self.num_seen, pair.sample.number
        if number >= before:
            self.arrived[number] = pair
        while not self.is_finished and self.num_seen in self.arrived:
            self._count(self.arrived.pop(self.num_seen))
            self.num_seen += 1
        return self.num_seen - before

    def _count(self, pair):
        missed = self.choice.thresholds.missed(pair.scores)
        for name in missed:
            self.missed[name] += 1
        self.num_good += not missed
        # Without CLIP all pairs are kept, and none has scores.
        is_unscored = self.choice.num_kept is None and pair.images is not None
        self.num_nan += bool(np.isnan(pair.scores).all()) and not is_unscored
        self.largest = np.fmax(self.largest, compared_scores(pair.scores))
        places = np.searchsorted(BINS, np.nan_to_num(pair.scores, nan=-1), "right") - 1
        self.histograms[np.arange(len(places)), places.clip(0, len(BINS) - 2)] += 1
        if self.best is None or direction_of(pair) > direction_of(self.best):
            self.best = pair
        if self.choice.num_kept is None:
            self.kept += [pair] if pair.images else []
        elif not missed:
            self.kept.append(pair)
            self.kept.sort(key=direction_of, reverse=True)  # a stable sort
            del self.kept[self.choice.num_kept :]

    def counts(self, caption):
        """What the report needs, for JSON."""
        largest = [round(float(x), 6) for x in self.largest]
        return {
            "line": caption.line,
            "samples": self.num_seen,
            "good": self.num_good,
            "nan": self.num_nan,
            "kept": len(self.kept),
            "missed": self.missed,
            "largest": dict(zip(Thresholds._fields, largest)),
        }


def direction_of(pair):
    """Its score, by which pairs are chosen; NaN is the least."""
    return np.nan_to_num(pair.scores.clip_direction, nan=-np.inf)


def row_of(caption, pair):
    """A row of the shards."""
    original, edited = ({"bytes": image, "path": None} for image in pair.images)
    return {
        "original_prompt": caption.input,
        "original_image": original,
        "edit_prompt": caption.edit,
        "edited_prompt": caption.output,
        "edited_image": edited,
        "line": caption.line,
        "sample": pair.sample.number,
        "guidance_scale": pair.sample.guidance_scale,
        "attention_sharing": pair.sample.attention_sharing,
        **pair.scores._asdict(),
    }


def row_groups(rows):
    """Rows in groups of limited number and bytes; rows: iterable, of which one group is held."""
    group, num_bytes = [], 0
    for row in rows:
        size = sum(len(row[name]["bytes"]) for name in ("original_image", "edited_image"))
        if group and (len(group) == ROW_GROUP_ROWS or num_bytes + size > ROW_GROUP_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(row)
        num_bytes += size
    if group:
        yield group


def write_rows(path, rows, counted):
    """Write rows and what is counted about them, {"lines", "histograms"}, to a parquet file."""
    schema = PAIR_SCHEMA.with_metadata({METADATA: json.dumps(counted)})

    def save(unfinished):
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(unfinished, schema, **options) as writer:
            for group in row_groups(rows):
                writer.write_table(pa.Table.from_pylist(group, schema))

    save_whole(path, save)


def read_counts(path):
    """What write_rows has counted; histograms as an array (scores, bins).

    Raises:
        ValueError: the file is damaged, or another program's.
    """
    try:
        counted = json.loads(pq.read_schema(path).metadata[METADATA])
    except (pa.ArrowException, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged, or not of make_pairs.py; remove it, and the same command makes "
            "its pairs again"
        ) from error
    return counted["lines"], np.array(counted["histograms"])


def json_of(settings):
    """Settings as JSON, with texts in place of what JSON does not have."""
    return json.dumps(settings, indent=2, default=str) + "\n"


class Output:
    """The output directory of a run.

    Args:
        folder: the directory.
        captions: list of Caption.
        lines_per_shard: lines of the list in a shard.
        worker, num_workers: shards worker, worker + num_workers, ... are this worker's.
    """

    def __init__(self, folder, captions, lines_per_shard, worker, num_workers):
        self.folder, self.captions, self.lines_per_shard = folder, captions, lines_per_shard
        num_shards = -(-len(captions) // lines_per_shard)
        self.shards = [
            folder / f"train-{i:05d}-of-{num_shards:05d}.parquet" for i in range(num_shards)
        ]
        self.own_shards = range(worker, num_shards, num_workers)
        self.num_workers = num_workers
        self.marker = folder / UNFINISHED_DIR / f"worker-{worker}-of-{num_workers}"
        # Without flock, filelock's soft lock would outlive a killed process.
        self.lock = FileLock(self.marker, fallback_to_soft=False)
        self.finished = set()  # places of this worker's lines whose pairs are on disk

    @property
    def is_begun(self):
        """Whether an earlier start has begun the run."""
        return (self.folder / SETTINGS).exists()

    def check(self, settings):
        """Raise a ValueError if the directory has other files, or pairs of other settings.

        settings: {flag: value}, for JSON.
        """
        check_writable(f"--output_dir {self.folder}", self.folder)
        found = next(self.folder.glob("[!.]*"), None)  # first: another worker may begin now
        if self.is_begun:
            self._compare(settings)
        elif found:
            raise ValueError(
                f"--output_dir {self.folder} is not empty ({found.name}); name another directory"
            )

    def _compare(self, settings):
        """Raise a ValueError if the run that has begun has other settings."""
        file, settings = self.folder / SETTINGS, json.loads(json_of(settings))
        try:
            before = read_json(file)
        except ValueError as error:
            raise ValueError(
                f"{file} is damaged, and nothing else says which flags made the pairs; name "
                "another directory"
            ) from error
        names = dict.fromkeys(x for x in (*settings, *before) if x != COMMAND)
        changed = [name for name in names if settings.get(name) != before.get(name)]
        if changed:
            was = ", ".join(NO_FLAGS.get(name, f"--{name}") for name in changed)
            command = f", or give the run's command: {before.get(COMMAND)}"
            raise ValueError(
                f"--output_dir {self.folder} has pairs of a run with other {was}; name another "
                f"directory{'' if changed == ['commit'] else command}"
            )

    def start(self, settings):
        """Begin or continue the run of checked settings; merges lines of complete shards.

        Raises:
            ValueError: a file with the name of a shard is not one; a run with other settings has
                begun, or another run of this worker.
        """
        if not self.is_begun:
            write_text(self.folder / SETTINGS, json_of(settings), shared=True)
        self._compare(settings)  # another run may have begun since the check
        for marker in self.marker.parent.glob("worker-*"):  # of a run with other workers
            if not marker.name.endswith(f"-of-{self.num_workers}"):
                other = FileLock(marker, fallback_to_soft=False)
                self._lock(other)
                remove(marker)
                other.release()
        self._lock(self.lock)
        try:
            self._find_shards()
        except ValueError:
            self.end()
            raise
        self._find_lines()

    def _lock(self, lock):
        """Create a lock file and lock it; refuse if another process holds the lock.

        The system releases the lock when the process ends. On file systems without flock there is
        a warning and no lock.

        Args:
            lock: FileLock.

        Raises:
            ValueError: another process holds the lock.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                self.marker.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire(blocking=False)
                return
            except Timeout as error:
                raise ValueError(
                    f"another run writes into --output_dir {self.folder}; wait until it ends "
                    "(machines that share a disk need --worker and --num_workers from the start)"
                ) from error
            except FileNotFoundError:  # another worker has removed the directory
                if not tries_left:
                    raise
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                Path(lock.lock_file).touch()
                warn_once(f"{lock.lock_file} cannot be locked; start each worker once")
                return

    def _find_shards(self):
        """Find the shards of an earlier start."""
        for shard in self.own_shards:
            if (file := self.shards[shard]).exists():
                lines, _ = read_counts(file)
                places = self.places(shard)
                if [line["line"] for line in lines] != [self.captions[i].line for i in places]:
                    raise ValueError(
                        f"{file} has the lines of another shard; remove it, and the same command "
                        "makes its pairs again"
                    )
                self.finished.update(places)

    def _find_lines(self):
        """Find the lines that an earlier start has finished, and complete what it left undone."""
        begun = set()  # shards with finished lines
        for file in self.marker.parent.iterdir():
            match = re.fullmatch(f"({re.escape(UNFINISHED_PREFIX)})?{LINE_FILE}", file.name)
            if not match:
                continue
            place = int(match[2])
            if (shard := place // self.lines_per_shard) not in self.own_shards:
                continue
            if match[1] or self.shards[shard].exists():  # of a killed run
                remove(file)
            else:
                self.finished.add(place)
                begun.add(shard)
        for shard in sorted(begun):
            self._merge(shard)

    def places(self, shard):
        """Places of a shard's captions in the list."""
        first = shard * self.lines_per_shard
        return range(first, min(first + self.lines_per_shard, len(self.captions)))

    def line_file(self, place):
        """The file of a finished line whose shard is not complete."""
        return self.folder / UNFINISHED_DIR / f"line-{place:09d}.parquet"

    def is_finished(self, place):
        """Whether the pairs of one of this worker's lines are on disk."""
        return place in self.finished

    def unfinished_shards(self):
        """The places of each shard of this worker that has unfinished lines, all of its lines."""
        for shard in self.own_shards:
            if not all(map(self.is_finished, self.places(shard))):
                yield self.places(shard)

    def unfinished_lines(self):
        """Places of this worker's captions whose pairs are to be made."""
        places = chain(*self.unfinished_shards())
        return [place for place in places if not self.is_finished(place)]

    def finish(self, place, line):
        """Write a finished Line, and its shard if it is complete; returns its counts."""
        caption, counts = self.captions[place], line.counts(self.captions[place])
        rows = [row_of(caption, pair) for pair in line.kept]
        counted = {"lines": [counts], "histograms": line.histograms.tolist()}
        write_rows(self.line_file(place), rows, counted)
        self.finished.add(place)
        self._merge(place // self.lines_per_shard)
        return counts

    def _merge(self, shard):
        """Write a shard if all its lines are there; removes their files."""
        if not all(map(self.is_finished, self.places(shard))):
            return
        files = [self.line_file(place) for place in self.places(shard)]
        if not self.shards[shard].exists():  # by the same worker, started twice without flock
            counts, histograms = zip(*map(read_counts, files))
            counted = {"lines": [*chain(*counts)], "histograms": sum(histograms).tolist()}
            rows = (row for file in files for row in pq.read_table(file).to_pylist())
            write_rows(self.shards[shard], rows, counted)
        for file in files:
            remove(file)

    def end(self):
        """Mark the directory as complete, unless other workers have unfinished shards in it."""
        remove(self.marker)
        self.lock.release()
        with suppress(OSError):
            self.marker.parent.rmdir()

    def counted(self):
        """(counts of the lines, histograms) of each of this worker's shards, which are complete."""
        return (read_counts(self.shards[shard]) for shard in self.own_shards)
