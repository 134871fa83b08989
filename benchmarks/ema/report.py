"""Summaries, tables and the plot of the figures."""

import numpy as np
from matplotlib.figure import Figure

from benchmarks.ema.cost import COST_DEVICES
from benchmarks.ema.quality import MEASURES
from benchmarks.rows import rows_of

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


def format_tables(results):
    """The figures as Markdown: medians, and least to largest."""

    def cell(figure, form):
        return f"{figure['median']:{form}} ({figure['min']:{form}}-{figure['max']:{form}})"

    lines = []
    for lr_scheduler, study in rows_of(results, "quality").items():
        lines += [
            f"{lr_scheduler} learning rate, {study['max_train_steps']} steps, "
            f"{len(study['runs'])} seeds:\n",
            "| average | held-out loss | to none | edit error | to none | right edit |",
            "|---|---|---|---|---|---|",
        ]
        for name, row in study["summary"].items():
            lines.append(
                f"| {name} | {cell(row['loss'], '.4f')} | {cell(row['loss_to_none'], '.3f')} | "
                f"{cell(row['edit_error_ratio'], '.3f')} | "
                f"{cell(row['edit_error_ratio_to_none'], '.3f')} | "
                f"{row['instruction_accuracy']['median']:.0%} |"
            )
        lines.append("")
    if cost := results.get("cost"):
        lines += ["| cost | step time to none | held by the average, MB |", "|---|---|---|"]
        figures, summary = cost["figures"], cost["summary"]
        for name, plan in figures["plans"].items():
            held = plan["average_bytes"] / 1e6
            lines.append(f"| {name} | {cell(summary[name], '.3f')} | {held:.2f} |")
        lines.append(
            f"\nOn each of {COST_DEVICES} devices the step, the same program with all averages, "
            f"has {figures['step']['temporary_bytes'] / 1e6:.1f} MB of temporaries; an update "
            f"accesses {summary['update_share']:.2%} of its bytes."
        )
    return "\n".join(lines)


def draw_quality(quality, sigma_rels):
    """Plot loss and edit error relative to none, over the post-hoc lengths and per average."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", width_ratios=(1, 1.3))
    titles = ("held-out loss, to none", "edit error, to none")
    for row, (measured, title) in enumerate(zip(MEASURES[:2], titles)):
        curve, dots = axes[row]
        for i, (lr_scheduler, study) in enumerate(quality.items()):
            summary = study["summary"]
            key, color = f"{measured}_to_none", f"C{i}"
            points = [summary[f"post-hoc {s}"][key] for s in sigma_rels]
            means, least, largest = (
                [point[k] for point in points] for k in ("mean", "min", "max")
            )  # fmt: skip
            curve.plot(sigma_rels, means, "o-", color=color, label=f"{lr_scheduler} rate")
            curve.fill_between(sigma_rels, least, largest, color=color, alpha=0.2)
            others = [n for n in summary if not n.startswith("post-hoc ")]
            for x, name in enumerate(others):
                for run in study["runs"]:
                    ratio = run["variants"][name][measured] / run["variants"]["none"][measured]
                    dots.plot(x + 0.15 * i, ratio, "o", color=color, alpha=0.7)
        curve.axhline(1, color="gray", linewidth=0.8)
        dots.axhline(1, color="gray", linewidth=0.8)
        curve.set(xscale="log", xlabel="post-hoc: sigma_rel", ylabel=title)
        curve.set_xticks(sigma_rels, [str(s) for s in sigma_rels], minor=False)
        curve.set_yscale("log")  # an average that still has the first weights is far from the rest
        curve.set_yticks(RATIO_TICKS, [str(ratio) for ratio in RATIO_TICKS])
        curve.minorticks_off()
        dots.minorticks_off()
        dots.set_xticks(range(len(others)), others, rotation=30, ha="right")
        curve.legend()
    return figure
