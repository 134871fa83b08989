"""What a run of make_pairs.py says about its pairs: previews of lines, report.json, report.png."""

import io
import json
from collections import Counter

import numpy as np
from PIL import Image

from diffusers_flax.data.archives.filtering import SCORES
from diffusers_flax.generating.captions import captioned, tile_grid
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import save_whole, write_text
from diffusers_flax.messages import first_names
from diffusers_flax.pairing.pair_scores import Scores, Thresholds
from diffusers_flax.pairing.pair_shards import BINS, direction_of

NUM_DRAWN = 12  # pairs in a preview


def write_preview(folder, caption, line):
    """Draw kept pairs of a line with their scores, or its best one, into FOLDER/previews.

    Args:
        folder: --output_dir.
        caption: Caption.
        line: MadeLine, finished. Of many pairs the ones with the largest direction are drawn.
    """
    pairs = sorted(line.kept or [line.best], key=direction_of, reverse=True)[:NUM_DRAWN]
    tiles = []
    for pair in pairs:
        scores, sample = pair.scores, pair.sample
        text = f"{sample.number}: scale {sample.guidance_scale:.1f}, "
        text += f"p {sample.attention_sharing:.2f}"
        if not np.isnan(scores).all():
            text += (
                f"; text {scores.clip_text_original:.2f} {scores.clip_text_edited:.2f}, "
                f"image {scores.clip_image:.2f}, direction {scores.clip_direction:.2f}"
            )
            below = ", ".join(line.thresholds.missed(scores))
            text += f"; below {below}" if below else ""
        if pair.images:  # not NaN
            images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pair.images]
            tiles.append(captioned(images, text))
    if tiles:
        text = f"{caption.line}: {caption.input} | {caption.edit} | {caption.output}"
        grid = captioned([tile_grid(tiles, min(len(tiles), 2), margin=8)], text)
        save_image(grid, folder / "previews" / f"{caption.line:09d}.jpg")


def summarize_counts(lines, thresholds):
    """The content of report.json but for the time.

    Args:
        lines: of PairShards.counts.
        thresholds: Thresholds.
    """
    lines = list(lines)
    totals = {
        name: sum(line[name] for line in lines) for name in ("samples", "good", "kept", "nan")
    }
    empty = []
    for line in lines:
        if not line["good"]:
            worst = max(line["missed"], key=line["missed"].get)  # threshold that failed most
            entry = {name: line[name] for name in ("line", "samples", "nan")} | {"threshold": worst}
            empty.append(entry | {name: line[name][worst] for name in ("missed", "largest")})
    histograms = np.zeros((len(Scores._fields), len(BINS) - 1), int)
    histograms = sum((np.array(line["histograms"]) for line in lines), histograms)
    return {
        "lines": len(lines),
        **totals,
        "lines_by_kept_pairs": dict(sorted(Counter(line["kept"] for line in lines).items())),
        "thresholds": thresholds._asdict(),
        "missed": {x: sum(line["missed"][x] for line in lines) for x in Thresholds._fields},
        "lines_without_good": empty,
        "bins": [round(float(x), 2) for x in BINS],
        "histograms": dict(zip(Scores._fields, histograms.tolist())),
    }


def warning_of_empty(report):
    """A sentence about lines without good pairs, with the thresholds that failed most, or ""."""
    empty, failed = report["lines_without_good"], Counter()
    for line in empty:
        failed["NaN" if line["nan"] == line["samples"] else f"--{line['threshold']}"] += 1
    names = first_names([str(line["line"]) for line in empty])
    reasons = ", ".join(f"{name} of {count}" for name, count in failed.most_common())
    return f"lines without a good sample: {names}; failed most: {reasons}" if empty else ""


def write_report(folder, name, report, has_scores=True):
    """Write NAME.json and, of scores, NAME.png; returns a line for the user.

    Args:
        folder: --output_dir.
        name: of the files.
        report: of summarize_counts, with seconds_per_kept_pair, None if this start kept no pair.
        has_scores: False without CLIP.
    """
    entries = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in report.items())
    write_text(folder / f"{name}.json", "{\n" + ",\n".join(entries) + "\n}\n")  # an entry is a line
    said = f"{report['kept']} pairs of {report['lines']} lines are kept"
    if has_scores:
        save_whole(folder / f"{name}.png", lambda path: draw_histograms(path, report))
        said += f"; {report['good']} of {report['samples']} samples reach the thresholds"
    else:
        said += ", without scores"
    seconds = report["seconds_per_kept_pair"]
    return f"{said}, {seconds:.2f} s per kept pair of this start" if seconds else said


def draw_histograms(path, report):
    """Draw the histograms of a report's scores, with their thresholds, as PNG."""
    from matplotlib.figure import Figure  # a second

    figure = Figure(figsize=(10, 6), layout="constrained")
    flags = {column: flag for flag, columns in SCORES.items() for column in columns}
    for axes, (name, counts) in zip(figure.subplots(2, 2).flat, report["histograms"].items()):
        axes.stairs(counts, BINS, fill=True)
        least, missed = report["thresholds"][flags[name]], report["missed"][flags[name]]
        axes.axvline(least, color="black", linestyle="dashed")
        reached = f"{report['samples'] - missed} of {report['samples']} reach"
        axes.set_title(f"{name}\n{reached} {flags[name]} {least:g}", fontsize=10)
        axes.set_ylabel("samples")
    figure.savefig(path, format="png", dpi=100)
