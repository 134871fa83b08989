"""Summaries and the plot of the figures."""

import numpy as np
from matplotlib.figure import Figure

from benchmarks.ema.quality import MEASURES

RATIO_TICKS = (0.5, 0.7, 1, 1.4, 2, 3, 5)  # of the plot


def summarize_values(values):
    """Mean, median, least and largest."""
    middle = {"mean": float(np.mean(values)), "median": float(np.median(values))}
    return middle | {"min": min(values), "max": max(values)}


def summarize_quality(runs):
    """Figures over runs of different seeds: {variant: {measure: what summarize_values returns}}.

    measure + "_to_none" is the ratio to "none" in the same run.
    """
    summary = {}
    for name in runs[0]["variants"]:
        summary[name] = {}
        for measured in MEASURES:
            values = [run["variants"][name][measured] for run in runs]
            summary[name][measured] = summarize_values(values)
        for measured in MEASURES[:2]:
            ratios = [
                run["variants"][name][measured] / run["variants"]["none"][measured] for run in runs
            ]
            summary[name][f"{measured}_to_none"] = summarize_values(ratios)
    return summary


def summarize_cost(figures):
    """{"update_share", name: figures of the ratio of step times, name / "none"}.

    The ratios are within a round; update_share is the ratio of bytes accessed, update / step.
    """
    update, step = (figures[name]["bytes_accessed"] for name in ("update", "step"))
    none = figures["plans"]["none"]["seconds"]
    return {"update_share": update / step} | {
        name: summarize_values([a / b for a, b in zip(plan["seconds"], none)])
        for name, plan in figures["plans"].items()
    }


def draw_quality(study, sigma_rels):
    """Plot loss and edit error relative to none, over the post-hoc lengths and per average."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", width_ratios=(1, 1.3))
    summary = study["summary"]
    others = [name for name in summary if not name.startswith("post-hoc ")]
    titles = ("held-out loss, to none", "edit error, to none")
    for (curve, dots), measured, title in zip(axes, MEASURES, titles):
        points = [summary[f"post-hoc {s}"][f"{measured}_to_none"] for s in sigma_rels]
        means, least, largest = ([point[k] for point in points] for k in ("mean", "min", "max"))
        curve.plot(sigma_rels, means, "o-")
        curve.fill_between(sigma_rels, least, largest, alpha=0.2)
        for x, name in enumerate(others):
            for run in study["runs"]:
                ratio = run["variants"][name][measured] / run["variants"]["none"][measured]
                dots.plot(x, ratio, "o", color="C0", alpha=0.7)
        curve.set(xscale="log", xlabel="post-hoc: sigma_rel", ylabel=title)
        curve.set_xticks(sigma_rels, [str(s) for s in sigma_rels], minor=False)
        curve.set_yscale("log")  # an average that still has the first weights is far from the rest
        curve.set_yticks(RATIO_TICKS, [str(ratio) for ratio in RATIO_TICKS])
        dots.set_xticks(range(len(others)), others, rotation=30, ha="right")
        for plot in (curve, dots):
            plot.axhline(1, color="gray", linewidth=0.8)
            plot.minorticks_off()
    return figure
