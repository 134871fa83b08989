"""Short runs of the trainer."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.ema import NO_AVERAGE
from diffusers_flax.training.reports import Reports

SIZE = dict(vae_channels=(16, 32), unet_channels=(16,))  # latents are half as wide as images
# A run small enough to be computed again by hand. Adam's epsilon is large so that the sign of a
# gradient that is zero but for rounding does not matter.
RUN = dict(
    resolution=16,
    train_batch_size=8,
    max_train_steps=5,
    learning_rate=0.03,
    lr_scheduler="cosine",
    lr_warmup_steps=2,
    adam_epsilon=1e-3,
    adam_weight_decay=0.1,
    max_grad_norm=0.05,
    conditioning_dropout_prob=0.2,
    seed=3,
    logging_steps=1,
)


def config_of(model, data, out, **options):
    """The trainer's Config of a run, with RUN and other options."""
    folders = dict(
        pretrained_model_name_or_path=str(model),
        unet_model_name_or_path=str(Path(model) / "unet"),
        train_data_dir=(str(data),),
        output_dir=str(out),
    )
    return trainer.Config(**folders | RUN | options)


def flags_of(config):
    """The command line that gives this config."""
    args = []
    for name, value in asdict(config).items():
        if isinstance(value, bool):
            args.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, tuple):
            # Without values, --aspect_ratio_buckets is another flag than none.
            is_given = value or name == "aspect_ratio_buckets"
            args += [f"--{name}", *map(str, value)] if is_given else []
        else:
            args.append(f"--{name}={value}")
    return args


def run_trainer(config, monkeypatch):
    """Run the trainer's main with the flags of a Config."""
    monkeypatch.setattr(sys, "argv", [trainer.__file__, *flags_of(config)])
    trainer.main(sys.argv[1:])


def run_badly(config, monkeypatch, capsys):
    """The trainer's one line of refusal, which leaves the working directory as it was."""
    files = sorted(Path().rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_trainer(config, monkeypatch)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == files
    return captured.err


def read_metrics(folder):
    """The rows of metrics.jsonl in a folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def make_reports(folder, start_step=0, **flags):
    """Reports of a run of 60 steps without averages, models and data; every step has a row."""
    config = trainer.Config("", "", output_dir=str(folder), **{"logging_steps": 1} | flags)
    dataset = SimpleNamespace(passes=lambda step: {})
    batches = SimpleNamespace(dataset=dataset, seconds_waited=0.0, num_bad=0, close=list)
    checkpoints = SimpleNamespace(start_step=start_step, record={})
    return Reports(config, 60, lambda step: 5e-5, NO_AVERAGE, batches, checkpoints)
