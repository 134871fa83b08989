"""Cost and benefit of averages of the weights (EMA).

    python -m benchmarks.ema

Quality (--measure quality), on the demo's task (demo/run_demo.py): runs of several seeds with a
constant learning rate. Each run tracks all averages at once, of the same weights, with the
trainer's own programs:

    none                    the last weights
    full 0.9999             from the first step
    full 0.9999, scaled     0.9999 ^ (15000 / steps): as long a share of this run as 0.9999 is of
                            the 15000 steps of Hugging Face's trainer
    full 0.9999, warm-up    Hugging Face's, (1 + n) / (10 + n) at first (--ema full --ema_warmup)
    late 3.6%, late 20%     over that share of the run at its end, with the decay 1 - 5 / window:
                            the trainer's default, and the demo's
    ... 0.9999              the same with that decay
    post-hoc S              rebuilt after training with the length sigma_rel S (ema_posthoc.py)

and measured on photographs that were not trained on: the denoising loss at fixed noise and
timesteps, and the demo's edit error, L1 to the true edit over L1 of the unedited image to it.
"post-hoc, best" is the length with the least loss of each run, on the same images.

Cost (--measure cost), on four forced CPU devices: time of a step with each kind of average,
alternating in several rounds, and the compiler's figures of memory and bytes. compile_for.py gives
these figures for Stable Diffusion on TPUs.

A tiny run, in minutes:

    python -m benchmarks.ema --seeds 0 --max_train_steps 8 --num_pairs 64 \\
        --crops_per_photograph 1 --loss_draws 1 --sigma_rels 0.05 0.1 \\
        --cost_rounds 1 --cost_steps 1 --output quick.json --plot quick.png

Replaces the measured rows of benchmarks/results/ema.json and draws docs/images/ema.png.
Needs an otherwise idle CPU; on two cores quality takes an hour, cost takes minutes.

Papers: EDM2 (arXiv 2312.02696); the late EMA is MosaicML's for Stable Diffusion 2.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import flax_train_instruct_pix2pix as trainer
from benchmarks.ema.cost import measure_cost
from benchmarks.ema.quality import NUM_SNAPSHOTS, study_quality
from benchmarks.ema.report import draw_quality, summarize_cost, summarize_quality
from benchmarks.ema.runs import make_demo
from benchmarks.harness import in_new_process
from benchmarks.rows import check_counts, describe_machine, run_benchmark, write_rows
from diffusers_flax.loading.files import save_whole
from diffusers_flax.training.ema import sigma_rel_to_gamma


@dataclass(frozen=True)
class Config:
    measure: tuple[Literal["cost", "quality"], ...] = ("cost", "quality")
    # quality
    seeds: tuple[int, ...] = (0, 1, 2)  # of the order of the data, noise and dropout
    max_train_steps: int = 1000  # at least 8
    train_batch_size: int = 16
    learning_rate: float = 1e-3
    num_pairs: int = 8000  # to train on
    crops_per_photograph: int = 2  # of each of three photographs, for eight edits each
    loss_draws: int = 24  # noises and timesteps of each held-out pair
    sigma_rels: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2)  # lengths to rebuild
    # cost
    cost_rounds: int = 10  # each measures every kind of step once
    cost_steps: int = 5  # steps of a measurement
    # output
    output: str = "benchmarks/results/ema.json"
    plot: str = "docs/images/ema.png"


def check_flags(config):
    """Raise a ValueError for invalid flags, before anything is made."""
    for name in ("measure", "seeds", "sigma_rels"):
        if not getattr(config, name):
            raise ValueError(f"{name} is empty; name at least one, or leave the flag out")
    check_counts(
        config,
        max_train_steps=NUM_SNAPSHOTS,
        train_batch_size=1,
        num_pairs=max(config.train_batch_size, trainer.Config.train_batch_size),
        crops_per_photograph=1,
        loss_draws=1,
        cost_rounds=1,
        cost_steps=1,
    )
    for sigma_rel in config.sigma_rels:
        sigma_rel_to_gamma(sigma_rel)


def run(config):
    """Study, write."""
    check_flags(config)
    machine = describe_machine(("jax", "jaxlib", "flax", "optax", "numpy"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_demo(folder, config.num_pairs, config.crops_per_photograph)
        if "cost" in config.measure:
            figures = in_new_process(measure_cost, folder, config.cost_rounds, config.cost_steps)
            row = {"figures": figures, "summary": summarize_cost(figures)}
            write_rows({"cost": row}, machine, config.output)
        if "quality" in config.measure:
            runs = study_quality(config, folder)
            study = {"max_train_steps": config.max_train_steps, "runs": runs}
            study["summary"] = summarize_quality(runs)
            write_rows({"quality": study}, machine, config.output)
            figure = draw_quality(study, config.sigma_rels)
            save_whole(Path(config.plot), partial(figure.savefig, dpi=110))
            print(f"wrote {config.plot}")


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
