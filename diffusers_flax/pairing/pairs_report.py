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
from diffusers_flax.pairing.pair_scores import Scores, missed
from diffusers_flax.pairing.pair_shards import BINS, choose_pairs, direction_of

NUM_DRAWN = 12  # pairs in a preview


def write_preview(config, caption, pairs):
    """Draw kept pairs of a line with their scores, or its best one, into OUTPUT_DIR/previews.

    Args:
        config: flags of make_pairs.py.
        caption: Caption.
        pairs: of the line, that count. Of many the ones with the largest direction are drawn.
    """
    best = sorted(pairs, key=direction_of, reverse=True)
    tiles = []
    for pair in sorted(choose_pairs(pairs, config), key=direction_of, reverse=True) or best[:1]:
        scores, sample = pair.scores, pair.sample
        text = f"{sample.number}: scale {sample.guidance_scale:.1f}, "
        text += f"p {sample.attention_sharing:.2f}"
        if config.clip_model:
            text += (
                f"; text {scores.clip_text_original:.2f} {scores.clip_text_edited:.2f}, "
                f"image {scores.clip_image:.2f}, direction {scores.clip_direction:.2f}"
            )
            below = ", ".join(missed(scores, config))
            text += f"; below {below}" if below else ""
        if pair.images and len(tiles) < NUM_DRAWN:  # not NaN
            images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pair.images]
            tiles.append(captioned(images, text))
    if tiles:
        text = f"{caption.line}: {caption.input} | {caption.edit} | {caption.output}"
        grid = captioned([tile_grid(tiles, min(len(tiles), 2), margin=8)], text)
        save_image(grid, config.output_dir / "previews" / f"{caption.line:09d}.jpg")


def write_report(config, name, lines, seconds):
    """Write NAME.json and, of scores, NAME.png; returns its content and lines for the user.

    Args:
        config: flags of make_pairs.py.
        name: of the files.
        lines: of PairShards.counts.
        seconds: for a kept pair of this start; None: it kept no pair.
    """
    lines = list(lines)
    empty = [line for line in lines if not line["good"]]
    # The threshold that failed most of each line
    failed = Counter(max(line["missed"], key=line["missed"].get) for line in empty)
    histograms = np.zeros((len(Scores._fields), len(BINS) - 1), int)
    histograms = sum((np.array(line["histograms"]) for line in lines), histograms)
    report = {
        "lines": len(lines),
        **{name: sum(line[name] for line in lines) for name in ("samples", "good", "kept")},
        "lines_by_kept_pairs": dict(sorted(Counter(line["kept"] for line in lines).items())),
        "thresholds": {flag: getattr(config, flag) for flag in SCORES},
        "missed": {x: sum(line["missed"][x] for line in lines) for x in SCORES},
        "lines_without_good": [line["line"] for line in empty],
        "bins": [round(float(x), 2) for x in BINS],
        "histograms": dict(zip(Scores._fields, histograms.tolist())),
        "seconds_per_kept_pair": seconds,
    }
    file = config.output_dir / f"{name}.json"
    write_text(file, json.dumps(report) + "\n")
    said = f"{report['kept']} pairs of {report['lines']} lines are kept"
    if not config.clip_model:
        return report, f"{said}, without scores"
    save_whole(file.with_suffix(".png"), lambda path: draw_histograms(path, report))
    said += f"; {report['good']} of {report['samples']} samples reach the thresholds"
    said += f", {seconds:.2f} s per kept pair of this start" if seconds else ""
    if empty:
        names = first_names([str(line) for line in report["lines_without_good"]])
        reasons = ", ".join(f"--{name} of {count}" for name, count in failed.most_common())
        said += f"\nlines without a good sample: {names}; failed most: {reasons}"
    return report, said


def draw_histograms(path, report):
    """Draw the histograms of a report's scores, with their thresholds, as PNG."""
    from matplotlib.figure import Figure  # a second

    figure = Figure(figsize=(10, 6), layout="constrained")
    flags = {column: flag for flag, columns in SCORES.items() for column in columns}
    for axes, (name, counts) in zip(figure.subplots(2, 2).flat, report["histograms"].items()):
        axes.stairs(counts, BINS, fill=True)
        least, missed_by = report["thresholds"][flags[name]], report["missed"][flags[name]]
        axes.axvline(least, color="black", linestyle="dashed")
        reached = f"{report['samples'] - missed_by} of {report['samples']} reach"
        axes.set_title(f"{name}\n{reached} {flags[name]} {least:g}", fontsize=10)
        axes.set_ylabel("samples")
    figure.savefig(path, format="png", dpi=100)
