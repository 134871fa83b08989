"""The shards of made pairs, and the choice of the pairs of a line.

    OUTPUT_DIR/make_pairs.json                  the flags and captions of the run
    OUTPUT_DIR/train-00000-of-00064.parquet     kept pairs of --lines_per_shard lines
    OUTPUT_DIR/.unfinished/worker-0             until all shards of this worker are there

A shard has the lines of a fixed part of the list, so that its content does not depend on the number
of workers. Its metadata have what is counted for the report. The same command started again keeps
shards and makes the others.
"""

import json
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.data.writing import ROW_GROUP_BYTES, ROW_GROUP_ROWS, SCHEMA
from diffusers_flax.loading.files import read_json, remove, save_whole, write_text
from diffusers_flax.messages import differences
from diffusers_flax.pairing.pair_scores import Scores, Thresholds, compared_scores, thresholds_of
from diffusers_flax.pairing.samples import PairSample

SETTINGS = "make_pairs.json"
METADATA = b"make_pairs"
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
    """A sample with its images and scores."""

    sample: PairSample
    scores: Scores  # NaN if an image is NaN
    images: tuple | None  # (original, edited), files as bytes; None: NaN, or nobody needs them


class MadeLine:
    """The pairs of a line of captions while they are made, counted in the order of their numbers.

    Args:
        config: flags of make_pairs.py: num_samples, num_kept, keep_all, early_stop, thresholds.
    """

    def __init__(self, config):
        self.config, self.thresholds = config, thresholds_of(config)
        self._waiting = {}  # {number: pair} of pairs behind a gap
        self._scores, self.num_good = [], 0  # of the pairs that count
        self.kept, self.best = [], None  # best: the pair with the largest direction

    @property
    def num_samples(self):
        """Number of pairs that count."""
        return len(self._scores)

    @property
    def is_finished(self):
        """Whether no more samples are needed."""
        is_enough = self.config.early_stop and self.num_good == self.config.num_kept
        return is_enough or self.num_samples == self.config.num_samples

    def add(self, pair):
        """Add a pair, which counts when all pairs of smaller numbers are there."""
        if pair.sample.number >= self.num_samples:
            self._waiting[pair.sample.number] = pair
        while not self.is_finished and self.num_samples in self._waiting:
            self._count(self._waiting.pop(self.num_samples))

    def _count(self, pair):
        is_good = not self.thresholds.missed(pair.scores)
        self._scores.append(pair.scores)
        self.num_good += is_good
        if self.best is None or direction_of(pair) > direction_of(self.best):
            self.best = pair
        if self.config.keep_all:
            self.kept += [pair] if pair.images else []
        elif is_good:
            ordered = sorted([*self.kept, pair], key=direction_of, reverse=True)
            self.kept = ordered[: self.config.num_kept]

    def counts(self, caption):
        """What the report needs, for JSON."""
        scores, compared = np.array(self._scores), map(compared_scores, self._scores)
        largest = np.fmax.reduce([np.full(len(Thresholds._fields), -1.0), *compared])
        missed = [name for x in self._scores for name in self.thresholds.missed(x)]
        known = np.nan_to_num(scores, nan=-1).clip(BINS[0], BINS[-1])
        return {
            "line": caption.line,
            "samples": self.num_samples,
            "good": self.num_good,
            "nan": int(np.isnan(scores).all(1).sum()) if self.config.clip_model else 0,
            "kept": len(self.kept),
            "missed": {name: missed.count(name) for name in Thresholds._fields},
            "largest": dict(zip(Thresholds._fields, np.round(largest, 6).tolist())),
            "histograms": [np.histogram(column, BINS)[0].tolist() for column in known.T],
        }


def direction_of(pair):
    """Its score, by which pairs are chosen; NaN is the least."""
    return np.nan_to_num(pair.scores.clip_direction, nan=-np.inf)


def rows_of(caption, line):
    """The rows of a MadeLine in its shard."""
    return [
        {
            "original_prompt": caption.input,
            "original_image": {"bytes": pair.images[0], "path": None},
            "edit_prompt": caption.edit,
            "edited_prompt": caption.output,
            "edited_image": {"bytes": pair.images[1], "path": None},
            "line": caption.line,
            "sample": pair.sample.number,
            "guidance_scale": pair.sample.guidance_scale,
            "attention_sharing": pair.sample.attention_sharing,
            **pair.scores._asdict(),
        }
        for pair in line.kept
    ]


class PairShards:
    """The output directory of a run.

    Args:
        folder: the directory.
        captions: list of Caption.
        lines_per_shard: lines of the list in a shard.
        worker, num_workers: shards worker, worker + num_workers, ... are this worker's.
    """

    def __init__(self, folder, captions, lines_per_shard, worker, num_workers):
        self.folder, self.captions, self.lines_per_shard = folder, captions, lines_per_shard
        self.num_shards = -(-len(captions) // lines_per_shard)
        self.own = range(worker, self.num_shards, num_workers)
        self.marker = folder / UNFINISHED_DIR / f"worker-{worker}"

    def file(self, shard):
        """The file of a shard."""
        return self.folder / f"train-{shard:05d}-of-{self.num_shards:05d}.parquet"

    def places(self, shard):
        """Places of a shard's captions in the list."""
        first = shard * self.lines_per_shard
        return range(first, min(first + self.lines_per_shard, len(self.captions)))

    def unfinished(self):
        """This worker's shards that are not there."""
        return [shard for shard in self.own if not self.file(shard).exists()]

    def check(self, settings):
        """Raise a ValueError if the directory has other files, or pairs of other settings.

        settings: {flag: value}, for JSON.
        """
        file = self.folder / SETTINGS
        found = next(self.folder.glob("[!.]*"), None)
        if not file.exists() and found:
            raise ValueError(
                f"--output_dir {self.folder} is not empty ({found.name}); name another directory"
            )
        current = json.loads(json.dumps(settings, default=str))
        changes = differences(read_json(file), current) if file.exists() else []
        if changes:
            raise ValueError(
                f"--output_dir {self.folder} has pairs of a run with other flags: "
                f"{'; '.join(changes)}; name another directory"
            )
        for shard in {*self.own} - {*self.unfinished()}:
            read_counts(self.file(shard))

    def start(self, settings):
        """Begin the run of checked settings."""
        text = json.dumps(settings, indent=2, default=str)
        write_text(self.folder / SETTINGS, f"{text}\n", shared=True)
        write_text(self.marker, "")

    def write(self, shard, lines):
        """Write a shard; lines: {place: MadeLine} of all its lines."""
        captions = [self.captions[place] for place in self.places(shard)]
        lines = [lines[place] for place in self.places(shard)]
        counts = [line.counts(caption) for caption, line in zip(captions, lines)]
        rows = [row for pair in zip(captions, lines) for row in rows_of(*pair)]
        schema = PAIR_SCHEMA.with_metadata({METADATA: json.dumps(counts)})
        table = pa.Table.from_pylist(rows, schema)
        per_group = ROW_GROUP_BYTES * len(rows) // max(table.nbytes, 1)
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        options["row_group_size"] = min(max(per_group, 1), ROW_GROUP_ROWS)
        save_whole(self.file(shard), lambda path: pq.write_table(table, path, **options))

    def end(self):
        """Mark the directory as complete, unless other workers have unfinished shards in it."""
        remove(self.marker)
        with suppress(OSError):
            self.marker.parent.rmdir()

    def counts(self):
        """What MadeLine.counts counted, of all lines of this worker's shards."""
        for shard in self.own:
            yield from read_counts(self.file(shard))


def read_counts(path):
    """What MadeLine.counts counted, of each line of a shard.

    Raises:
        ValueError: the file is damaged, or another program's.
    """
    try:
        return json.loads(pq.read_schema(path).metadata[METADATA])
    except (pa.ArrowException, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged, or not of make_pairs.py; remove it, and the same command makes "
            "its pairs again"
        ) from error
