"""The shards of made pairs, the choice of the pairs of a line, previews and the report.

    OUTPUT_DIR/make_pairs.json                  the flags and captions of the run
    OUTPUT_DIR/train-00000-of-00064.parquet     kept pairs of --lines_per_shard lines
    OUTPUT_DIR/.unfinished/worker-0             until all shards of this worker are there
    OUTPUT_DIR/previews, report.json            what a user looks at

A shard has the lines of a fixed part of the list, so that its content does not depend on the number
of workers. Its metadata have what is counted for the report. The same command started again keeps
shards and makes the others.
"""

import io
import json
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from diffusers_flax.data.archives.filtering import SCORES
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.data.writing import ROW_GROUP_BYTES, ROW_GROUP_ROWS, SCHEMA
from diffusers_flax.generating.captions import captioned, tile_grid
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import read_json, remove, save_whole, write_text
from diffusers_flax.messages import differences, first_names
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
NUM_DRAWN = 12  # pairs in a preview


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
    """What the report says of a line, for JSON; pairs: that count."""
    missing = [missed(pair.scores, config) for pair in pairs]
    return {
        "line": caption.line,
        "samples": len(pairs),
        "good": missing.count([]),
        "kept": len(choose_pairs(pairs, config)),
        "missed": {name: sum(name in names for names in missing) for name in SCORES},
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
        metadata = (pq.read_schema(self.file(shard)).metadata for shard in self.own)
        return [line for entries in metadata for line in json.loads(entries[METADATA])]


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


def write_preview(config, caption, pairs):
    """Draw kept pairs of a line with their scores, or its best one, into OUTPUT_DIR/previews.

    Args:
        config: flags of make_pairs.py.
        caption: Caption.
        pairs: of the line, that count. Of many the ones with the largest direction are drawn.
    """
    drawn = choose_pairs(pairs, config) or [max(pairs, key=direction_of)]
    drawn = sorted((x for x in drawn if x.images), key=direction_of, reverse=True)
    tiles = []
    for pair in drawn[:NUM_DRAWN]:
        scores, sample = pair.scores, pair.sample
        text = (
            f"{sample.number}: scale {sample.guidance_scale:.1f}, p {sample.attention_sharing:.2f};"
            f" text {scores.clip_text_original:.2f} {scores.clip_text_edited:.2f}, "
            f"image {scores.clip_image:.2f}, direction {scores.clip_direction:.2f}"
        )
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pair.images]
        tiles.append(captioned(images, text))
    if tiles:
        text = f"{caption.line}: {caption.input} | {caption.edit} | {caption.output}"
        grid = captioned([tile_grid(tiles, min(len(tiles), 2), margin=8)], text)
        save_image(grid, config.output_dir / "previews" / f"{caption.line:09d}.jpg")


def write_report(config, name, lines, seconds):
    """Write NAME.json; returns its content and lines for the user.

    Args:
        config: flags of make_pairs.py.
        name: of the file.
        lines: list of what counts_of counted.
        seconds: for a kept pair of this start; None: it kept no pair.
    """
    report = {
        "lines": len(lines),
        **{name: sum(line[name] for line in lines) for name in ("samples", "good", "kept")},
        "thresholds": {flag: getattr(config, flag) for flag in SCORES},
        "missed": {x: sum(line["missed"][x] for line in lines) for x in SCORES},
        "lines_without_good": [line["line"] for line in lines if not line["good"]],
        "seconds_per_kept_pair": seconds,
    }
    write_text(config.output_dir / f"{name}.json", json.dumps(report) + "\n")
    said = f"{report['kept']} pairs of {report['lines']} lines are kept"
    if not config.clip_model:
        return report, f"{said}, without scores"
    said += f"; {report['good']} of {report['samples']} samples reach the thresholds"
    said += f", {seconds:.2f} s per kept pair of this start" if seconds else ""
    if report["lines_without_good"]:
        names = first_names([str(line) for line in report["lines_without_good"]])
        reasons = ", ".join(f"--{flag} by {count}" for flag, count in report["missed"].items())
        said += f"\nlines without a good sample: {names}; samples miss {reasons}"
    return report, said
