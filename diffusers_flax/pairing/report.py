"""What a run of make_pairs.py says about its pairs: previews of lines, report.json, report.png."""

import io
import json
from collections import Counter
from contextlib import suppress

import numpy as np
from PIL import Image

from diffusers_flax.data.archives.filtering import SCORES
from diffusers_flax.generating.captions import captioned, tile_grid
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import read_json, save_whole, write_text
from diffusers_flax.pairing.results import BINS, direction_of
from diffusers_flax.pairing.scores import Scores, Thresholds

PREVIEWS = "previews"  # directory below --output_dir
NUM_DRAWN = 12  # pairs in a preview
NUM_NAMED = 10  # lines that are named in a warning
THRESHOLD_OF = {column: flag for flag, columns in SCORES.items() for column in columns}


def write_preview(folder, caption, line):
    """Draw the kept pairs of a line with their scores, or its best one if none is kept.

    Args:
        folder: --output_dir.
        caption: Caption.
        line: Line, finished. Of many pairs the first are drawn, good ones before the others, and of
            these the ones with the largest direction.
    """
    missed = line.choice.thresholds.missed
    pairs = line.kept or [line.best]
    if len(pairs) > NUM_DRAWN:
        pairs = sorted(pairs, key=lambda x: (not missed(x.scores), direction_of(x)), reverse=True)
    pairs, tiles = [x for x in pairs if x.images], []
    if not pairs:  # all are NaN
        return
    for pair in pairs[:NUM_DRAWN]:
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pair.images]
        scores, sample = pair.scores, pair.sample
        text, has_scores = f"{sample.number}: ", not np.isnan(scores).all()
        if has_scores:
            text += (
                f"text {scores.clip_text_original:.2f} {scores.clip_text_edited:.2f}, "
                f"image {scores.clip_image:.2f}, direction {scores.clip_direction:.2f}; "
            )
        text += f"scale {sample.guidance_scale:.1f}, p {sample.attention_sharing:.2f}"
        if has_scores and (below := missed(scores)):
            text += f"; below {', '.join(below)}"
        tiles.append(captioned(images, text))
    columns = min(len(tiles), 2)
    grid = tile_grid(tiles, columns, margin=8)
    text = f"{caption.line}: {caption.input} | {caption.edit} | {caption.output}"
    if (more := len(pairs) - NUM_DRAWN) > 0:
        text += f" ({more} more pairs are kept)"
    save_image(captioned([grid], text), line_preview(folder, caption.line))


def line_preview(folder, line):
    """The preview of a line, by its number in the list."""
    return folder / PREVIEWS / f"{line:09d}.jpg"


def why_empty(line):
    """The threshold that failed most in a line without good pairs; line: of Line.counts."""
    name, number = max(line["missed"].items(), key=lambda item: item[1])
    counts = {key: line[key] for key in ("line", "samples", "nan")}
    return counts | {"threshold": name, "missed": number, "largest": line["largest"][name]}


def warn_of_empty(report):
    """Sentences about lines without good pairs, with the threshold that failed most.

    report: of summarize_counts.
    """
    empty, sentences = report["lines_without_good"], []
    for line in empty[:NUM_NAMED]:
        if line["nan"] == line["samples"]:
            sentences.append(f"line {line['line']}: all images are NaN; try --dtype float32")
            continue
        name, number = line["threshold"], line["missed"]
        sentences.append(
            f"line {line['line']}: none of {line['samples']} samples is good; {number} "
            f"{'is' if number == 1 else 'are'} below --{name} {report['thresholds'][name]:g}, the "
            f"largest value is {line['largest']:.3f}"
        )
    if (more := len(empty) - NUM_NAMED) > 0:
        sentences.append(f"{more} more lines have no good sample; the report names them")
    return sentences


def summarize_counts(counted, thresholds):
    """The content of report.json but for the time.

    Args:
        counted: of Output.counted.
        thresholds: Thresholds.
    """
    totals = Counter(lines=0, samples=0, good=0, kept=0, nan=0)
    missed = Counter(dict.fromkeys(Thresholds._fields, 0))
    per_line, empty = Counter(), []
    histograms = np.zeros((len(Scores._fields), len(BINS) - 1), int)
    for lines, of_shard in counted:
        histograms += of_shard
        for line in lines:
            totals.update({key: line[key] for key in ("samples", "good", "nan", "kept")}, lines=1)
            missed.update(line["missed"])
            per_line[line["kept"]] += 1
            if not line["good"]:
                empty.append(why_empty(line))
    return {
        **totals,
        "lines_by_kept_pairs": {number: per_line[number] for number in sorted(per_line)},
        "thresholds": thresholds._asdict(),
        "missed": missed,
        "lines_without_good": empty,
        "bins": [round(float(x), 2) for x in BINS],
        "histograms": dict(zip(Scores._fields, histograms.tolist())),
    }


def write_report(folder, name, report, seconds_per_pair, has_scores=True):
    """Write NAME.json and, of scores, NAME.png.

    Args:
        folder: --output_dir.
        name: of the files.
        report: of summarize_counts.
        seconds_per_pair: time of this start per kept pair, after compiling; None: it has kept none,
            and the time of an earlier start stays.
        has_scores: False without CLIP.

    Returns:
        A line for the user.
    """
    file = folder / f"{name}.json"
    before = {}
    if file.exists():
        with suppress(ValueError):  # a damaged report is replaced
            before = read_json(file)
    seconds = seconds_per_pair or before.get("seconds_per_kept_pair")
    entries = report | {"seconds_per_kept_pair": seconds}
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
    write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")  # an entry is a line
    if has_scores:
        save_whole(folder / f"{name}.png", lambda path: draw(path, report))
    time = (
        ""
        if seconds_per_pair is None
        else f", {seconds_per_pair:.2f} s per kept pair of this start"
    )
    kept = f"{report['kept']} pairs of {report['lines']} lines are kept"
    if not has_scores:
        return f"{kept}, without scores{time}"
    good = f"{report['good']} of {report['samples']} samples reach the thresholds"
    return f"{kept}; {good}{time}"


def draw(path, report):
    """Draw the histograms of a report's scores, with their thresholds, as PNG."""
    from matplotlib.figure import Figure  # a second

    figure = Figure(figsize=(10, 6), layout="constrained")
    middles = (BINS[1:] + BINS[:-1]) / 2
    for axes, (name, counts) in zip(figure.subplots(2, 2).flat, report["histograms"].items()):
        histogram = np.array(counts)
        axes.bar(middles, histogram, width=BINS[1] - BINS[0])
        flag = THRESHOLD_OF[name]
        least = report["thresholds"][flag]
        axes.axvline(least, color="black", linestyle="dashed")
        reached = report["samples"] - report["missed"][flag]
        both = " with both images" if flag == "min_clip_text" else ""
        title = f"{name}\n{reached} of {report['samples']} reach {flag} {least:g}{both}"
        axes.set_title(title, fontsize=10)
        used = np.flatnonzero(histogram)
        if len(used):
            axes.set_xlim(min(BINS[used[0]], least) - 0.05, max(BINS[used[-1] + 1], least) + 0.05)
        axes.set_ylabel("samples")
    figure.savefig(path, format="png", dpi=100)
