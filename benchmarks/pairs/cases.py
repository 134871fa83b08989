"""make_pairs.py on this machine: time outside of the compiled programs, and memory.

    python -m benchmarks.pairs

The case "time" makes 200 samples of 10 lines, 256x256 pixels, with a model whose steps take real
time. Outside of the programs is the time, from the start to the last shard, in which none of them
makes images. It also measures a batch of images and of CLIP alone, before and after: on an idle
machine a batch of the run takes as long, apart from scores and JPEG files, which share the cores.
The case "host" does the host's work for pairs of 512x512 pixels without compiled programs:
captions, CLIP's preprocessing, JPEG files, shards; all pairs are kept. The case "memory" makes 4
samples of each of 200 lines with the demo's model, and reads the memory of the process after 20
lines and after all. Ten minutes on two idle cores; in two minutes:

    python -m benchmarks.pairs --num_samples 2 --num_lines 40 --output pairs.json

Rows go to benchmarks/results/pairs.json.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from tqdm import tqdm

import make_pairs
from benchmarks.harness import in_new_process, mean_seconds
from benchmarks.random_models import (
    END_OF_TEXT,
    IDS,
    SD15,
    TEXT_ENCODER,
    TINY_UNET,
    TINY_VAE,
    TOKENIZER,
    UNET,
    VAE,
    write_pipeline,
)
from benchmarks.rows import ROOT, check_counts, describe_machine, run_benchmark, write_rows
from diffusers_flax.generating.batches import DeviceClock
from diffusers_flax.pairing.captions import read_captions
from diffusers_flax.pairing.maker import PairMaker
from diffusers_flax.pairing.results import Choice, Line, Output
from diffusers_flax.pairing.samples import chunks_of
from diffusers_flax.pairing.scores import Scorer, Thresholds

TIMED_LINES = 10
SAMPLES_OF_MEMORY = 4  # of each line
BATCH_SIZE = 4
SIDE = 256
CHANNELS = (64, 128)  # of the UNet
FIRST_LINES = 20  # after which memory is read
HOST_SIDE = 512
HOST_SAMPLES = 40


@dataclass(frozen=True)
class Config:
    cases: tuple[Literal["time", "host", "memory"], ...] = ("time", "host", "memory")
    num_samples: int = 20  # of each of 10 lines, for time
    num_inference_steps: int = 8  # likewise
    num_lines: int = 200  # for memory
    output: str = "benchmarks/results/pairs.json"


def make_model(folder):
    """Write a model of 256 pixels with random weights; call it in a new process."""
    jax.config.update("jax_platforms", "cpu")
    side = SIDE // 8
    modules = {
        "unet": UNET.clone(**TINY_UNET | {"block_out_channels": CHANNELS}, sample_size=side),
        "vae": VAE.clone(**TINY_VAE),
        "text_encoder": TEXT_ENCODER.clone(vocab_size=END_OF_TEXT + 1, num_hidden_layers=2),
    }
    settings = {"requires_safety_checker": False, "safety_checker": [None, None]}
    settings["feature_extractor"] = [None, None]
    write_pipeline(folder, modules, "StableDiffusionPipeline", SD15["scheduler"], settings)


def make_clip(folder):
    """Write a CLIP with random weights for images of 224 pixels, a tenth of ViT-B/32."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    torch.manual_seed(0)
    tower = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    tower |= {"num_attention_heads": 4, "projection_dim": 128}
    text = tower | {"vocab_size": END_OF_TEXT + 1} | IDS
    vision = tower | {"image_size": 224, "patch_size": 32}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=128)
    CLIPModel(config).save_pretrained(folder)
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    CLIPProcessor(CLIPImageProcessor(), tokenizer).save_pretrained(folder)


def write_captions(file, num_lines):
    """Write lines of captions; returns the file."""
    places = [f"field {n}" for n in range(num_lines)]
    rows = [
        {"input": f"a photo of {x}", "edit": "at night", "output": f"a photo of {x} at night"}
        for x in places
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Run:
    """A run of make_pairs.py in this process, with its own functions.

    Args:
        folder: directory with "clip", for captions and shards.
        model, num_lines, num_samples, num_inference_steps: what to make, with which model.
    """

    def __init__(self, folder, model, num_lines, num_samples, num_inference_steps):
        captions = write_captions(folder / "captions.jsonl", num_lines)
        self.config = make_pairs.Config(
            model=str(model),
            captions=captions,
            output_dir=folder / "data",
            num_samples=num_samples,
            num_inference_steps=num_inference_steps,
            batch_size=BATCH_SIZE,
            clip_model=str(folder / "clip"),
            **dict.fromkeys(Thresholds._fields, -1.0),
        )
        make_pairs.check_flags(self.config)
        self.captions = read_captions(captions)
        devices = jax.local_devices()[:1]
        models = make_pairs.open_models(self.config, self.captions, num_lines, devices)
        pipeline, params, self.clip = models
        scorer = Scorer(self.clip, self.captions)
        self.maker = PairMaker(pipeline, params, scorer, self.captions, self.config)
        chunk = chunks_of([0], num_samples, BATCH_SIZE)[0]
        self.prepared = self.maker.prepare([chunk])
        images = self.maker.dispatch(self.prepared)  # compiles
        (chunk,) = self.maker.collect(self.prepared, images)
        self.maker.score(self.prepared[0][0], *chunk, 0)  # likewise

    def batch_seconds(self):
        """Seconds of the compiled programs of a batch, alone: {program: seconds}."""
        side = self.clip.side
        pixels = np.zeros((2 * BATCH_SIZE, 3, side, side), np.float32)
        return {
            "images": mean_seconds(
                lambda: jax.block_until_ready(self.maker.dispatch(self.prepared)), 10
            ),
            "clip": mean_seconds(lambda: self.clip._encode_images(0, pixel_values=pixels), 2),
        }

    def make(self, each=lambda: None):
        """Make all pairs and shards; returns (seconds, DeviceClock).

        each: called after each line.
        """
        output = Output(self.config.output_dir, self.captions, 5, 0, 1)
        output.start({})
        clock, total = DeviceClock(), self.config.num_samples * len(self.captions)
        started = time.perf_counter()
        with tqdm(total=total, unit="sample") as bar:
            for place, line in self.maker.make(output, bar, clock):
                output.finish(place, line)
                each()
        output.end()
        return time.perf_counter() - started, clock


def measure_time(folder, config):
    """The row of the case "time"."""
    run = Run(folder, folder / "model", TIMED_LINES, config.num_samples, config.num_inference_steps)
    before = run.batch_seconds()
    seconds, clock = run.make()
    after = run.batch_seconds()
    busy = clock.ready - clock.begin - clock.waited
    return {
        "samples": TIMED_LINES * config.num_samples,
        "batches": clock.num_batches,
        "batch_size": BATCH_SIZE,
        "side": SIDE,
        "steps": config.num_inference_steps,
        "seconds": seconds,
        "seconds_of_programs": busy,
        "share_outside": 1 - busy / seconds,
        "seconds_of_a_batch": seconds / clock.num_batches,
        "seconds_alone": {"before": before, "after": after},
    }


def measure_host(folder, config):
    """The row of the case "host": CPU seconds of all threads for a pair."""
    run = Run(folder, ROOT / "demo/base_model", 1, HOST_SAMPLES, 1)
    rng = np.random.default_rng(0)
    shape, large = (2 * BATCH_SIZE, 64, 64, 3), (HOST_SIDE // 64, HOST_SIDE // 64, 1)
    images = np.stack([np.kron(x, np.ones(large)) for x in rng.random(shape)])  # blocks of 8 pixels
    images = np.float32(images * 0.9 + rng.random(images.shape) * 0.1)
    features = np.ones((2 * BATCH_SIZE, run.clip.dim), np.float32)
    run.clip._encode_images = lambda device, pixel_values: features
    output = Output(run.config.output_dir, run.captions, 1, 0, 1)
    output.start({})
    line = Line(Choice(HOST_SAMPLES, None, Thresholds(-1, -1, -1)))
    began = time.process_time()
    for chunk in chunks_of([0], HOST_SAMPLES, BATCH_SIZE):
        prepared = run.maker.prepare([chunk])
        (collected,) = run.maker.collect(prepared, [images])
        for pair in run.maker.score(prepared[0][0], *collected, 0):
            line.add(pair)
    output.finish(0, line)
    seconds = (time.process_time() - began) / HOST_SAMPLES
    return {"samples": HOST_SAMPLES, "side": HOST_SIDE, "cpu_seconds_per_pair": seconds}


def resident_bytes():
    """Memory of this process."""
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index("VmRSS:") + 1])


def measure_memory(folder, config):
    """The row of the case "memory"."""
    run = Run(folder, ROOT / "demo/base_model", config.num_lines, SAMPLES_OF_MEMORY, 2)
    sizes = []
    run.make(lambda: sizes.append(resident_bytes()))
    return {
        "lines": config.num_lines,
        "samples": SAMPLES_OF_MEMORY * config.num_lines,
        "first_lines": FIRST_LINES,
        "bytes_first": sizes[FIRST_LINES - 1],
        "bytes_last": sizes[-1],
        "bytes_most": max(sizes),
    }


CASES = {"time": measure_time, "host": measure_host, "memory": measure_memory}


def run(config):
    """Measure each case in a new process and write its row."""
    check_counts(config, num_samples=1, num_inference_steps=1, num_lines=FIRST_LINES + 1)
    for case in config.cases:
        machine = describe_machine()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            in_new_process(make_clip, folder / "clip")
            if case == "time":
                in_new_process(make_model, folder / "model")
            row = in_new_process(CASES[case], folder, config)
        write_rows({case: row}, machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)
