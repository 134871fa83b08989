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

from diffusers_flax.data.archives.filtering import SCORES
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.data.writing import ROW_GROUP_BYTES, ROW_GROUP_ROWS, SCHEMA
from diffusers_flax.loading.files import read_json, remove, save_whole, write_text
from diffusers_flax.messages import differences
from diffusers_flax.pairing.pair_scores import Scores, missed
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


def counted_pairs(pairs, config):
    """(the pairs of a line that count, in order; whether no more samples are needed).

    Args:
        pairs: {number of the sample: MadePair}, of a line, that are there.
        config: flags of make_pairs.py: num_samples, num_kept, early_stop, thresholds.
    """
    counted, num_good = [], 0
    for number in range(config.num_samples):
        if config.early_stop and num_good == config.num_kept:
            return counted, True
        if number not in pairs:
            return counted, False
        counted.append(pairs[number])
        num_good += not missed(pairs[number].scores, config)
    return counted, True


def direction_of(pair):
    """Its score, by which pairs are chosen; NaN is the least."""
    return np.nan_to_num(pair.scores.clip_direction, nan=-np.inf)


def choose_pairs(pairs, config):
    """The pairs to keep of the ones that count: the best of the good ones, or all."""
    if config.keep_all:
        return [pair for pair in pairs if pair.images]
    good = [pair for pair in pairs if not missed(pair.scores, config)]
    return sorted(good, key=direction_of, reverse=True)[: config.num_kept]


def counts_of(caption, pairs, config):
    """What the report needs of a line, for JSON; pairs: that count."""
    scores = np.array([pair.scores for pair in pairs])
    names = [name for pair in pairs for name in missed(pair.scores, config)]
    known = np.nan_to_num(scores, nan=-1).clip(BINS[0], BINS[-1])
    return {
        "line": caption.line,
        "samples": len(pairs),
        "good": sum(not missed(pair.scores, config) for pair in pairs),
        "kept": len(choose_pairs(pairs, config)),
        "missed": {name: names.count(name) for name in SCORES},
        "histograms": [np.histogram(column, BINS)[0].tolist() for column in known.T],
    }


class PairShards:
    """The output directory of a run.

    Args:
        config: flags of make_pairs.py.
        captions: list of Caption.
        lines_per_shard: lines of the list in a shard.
        worker, num_workers: shards worker, worker + num_workers, ... are this worker's.
    """

    def __init__(self, config, captions, lines_per_shard, worker, num_workers):
        self.config, self.folder = config, config.output_dir
        self.captions, self.lines_per_shard = captions, lines_per_shard
        self.num_shards = -(-len(captions) // lines_per_shard)
        self.own = range(worker, self.num_shards, num_workers)
        self.marker = self.folder / UNFINISHED_DIR / f"worker-{worker}"

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
        if changes := differences(read_json(file), current) if file.exists() else []:
            raise ValueError(
                f"--output_dir {self.folder} has pairs of a run with other flags: "
                f"{'; '.join(changes)}; name another directory"
            )

    def start(self, settings):
        """Begin the run of checked settings."""
        text = json.dumps(settings, indent=2, default=str)
        write_text(self.folder / SETTINGS, f"{text}\n", shared=True)
        write_text(self.marker, "")

    def write(self, shard, lines):
        """Write a shard; lines: {place: pairs that count} of all its lines."""
        rows, counts = [], []
        for place in self.places(shard):
            caption, pairs = self.captions[place], lines[place]
            counts.append(counts_of(caption, pairs, self.config))
            rows += [row_of(caption, pair) for pair in choose_pairs(pairs, self.config)]
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
        """What counts_of counted, of all lines of this worker's shards."""
        for shard in self.own:
            yield from json.loads(pq.read_schema(self.file(shard)).metadata[METADATA])


def row_of(caption, pair):
    """The row of a MadePair in its shard."""
    return {
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
