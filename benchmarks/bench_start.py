"""How long a start of the SDXL scripts takes to its first picture: with jit, its cache, AOT.

    python benchmarks/bench_start.py

Makes a pipeline of SDXL's kind with random weights and runs, each in a process of its own and each
twice, for one picture of one step: sdxl_single.py without a cache and with jax's persistent one,
sdxl_single_aot.py with nothing kept and with its executable. The first start of a pair fills what
the second one finds. By default the UNet has Stable Diffusion 1.5's size (860M parameters, 256
pixels); `--size tiny` takes a minute:

    python benchmarks/bench_start.py --size tiny --output start.json

Adds to benchmarks/results/start.json, a row for each size, and prints a table. Needs a CPU and 16
GB of memory; three minutes on two cores that do nothing else.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.full_size import (  # noqa: E402
    END_OF_TEXT,
    TEXT_ENCODER,
    TINY_UNET,
    TOKENIZER,
    UNET,
    VAE,
    command_line,
    describe_machine,
    in_new_process,
    read_results,
    this_command,
    write_json,
    write_module,
)
from config_flax import write_json as write_config  # noqa: E402
from modeling_flax_clip import FlaxCLIPTextModelWithProjectionModule  # noqa: E402
from scheduling_flax import FlaxEulerDiscreteScheduler  # noqa: E402

SECONDS = re.compile(r"^(?:compiled|loaded).* in ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True)
class Config:
    size: Literal["tiny", "sd15"] = "sd15"  # of the UNet
    rounds: int = 1  # of all starts
    output: str = "benchmarks/results/start.json"


def make_model(folder, size):
    """Write a pipeline of SDXL's kind: the UNet of that size, the rest tiny.

    To be called in a process of its own, so that its memory is returned.
    """
    jax.config.update("jax_platforms", "cpu")
    text_encoder = TEXT_ENCODER.clone(
        vocab_size=END_OF_TEXT + 1,
        hidden_size=384,
        intermediate_size=384,
        num_attention_heads=6,
        num_hidden_layers=2,
    )
    options = {name: getattr(text_encoder, name) for name in text_encoder.config}
    options |= {"projection_dim": 384, "hidden_act": "gelu"}
    unet = UNET.clone(
        sample_size=32,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=384 + 6 * 256,
    )
    if size == "tiny":
        unet = unet.clone(sample_size=8, **TINY_UNET)
    modules = {
        "unet": unet,
        "vae": VAE.clone(block_out_channels=(32, 32, 32, 32), layers_per_block=1),
        "text_encoder": text_encoder,
        "text_encoder_2": FlaxCLIPTextModelWithProjectionModule(**options),
    }
    write_pipeline(folder, modules)


def write_pipeline(folder, modules):
    """Write a folder of SDXL's kind with random weights; modules: {name: module}."""
    index = {"_class_name": "StableDiffusionXLPipeline", "force_zeros_for_empty_prompt": True}
    for name, module in modules.items():
        write_module(folder / name, module)
        library = "transformers" if name.startswith("text") else "diffusers"
        index[name] = [library, module.torch_class_name]
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(TOKENIZER, folder / name)
        index[name] = ["transformers", "CLIPTokenizer"]
    FlaxEulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
    ).save_pretrained(folder / "scheduler")
    index["scheduler"] = ["diffusers", "EulerDiscreteScheduler"]
    write_config(folder / "model_index.json", index)


def start(script, folder, *options):
    """Run a script for one picture.

    Returns:
        {"seconds": from start to end of the process, "compile_seconds": what it says of compiling
        or loading, None of a script that does not tell}.
    """
    output = folder / "picture.png"
    output.unlink(missing_ok=True)
    command = [sys.executable, script, "--pretrained_model_name_or_path", str(folder / "model")]
    command += ["--prompt", "a photograph", "--num_images", "1", "--num_inference_steps", "1"]
    environment = os.environ | {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--output", str(output), *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise ChildProcessError(f"{script} failed: {said[-1]}")
    told = SECONDS.search(done.stderr)
    return {"seconds": seconds, "compile_seconds": float(told[1]) if told else None}


def bench(folder, size, rounds):
    """All starts.

    Returns:
        {what: [figures of start, one per round]}.
    """
    in_new_process(make_model, folder / "model", size)
    cache, kept = folder / "cache", folder / "kept"
    figures = {}
    for _ in range(rounds):
        for place in (cache, kept):
            shutil.rmtree(place, ignore_errors=True)
        for name, script, *options in (
            ("jit, no cache", "sdxl_single.py", "--compilation_cache_dir", ""),
            ("jit, first start", "sdxl_single.py", "--compilation_cache_dir", str(cache)),
            ("jit, persistent cache", "sdxl_single.py", "--compilation_cache_dir", str(cache)),
            ("AOT, first start", "sdxl_single_aot.py", "--executable_dir", str(kept)),
            ("AOT, executable kept", "sdxl_single_aot.py", "--executable_dir", str(kept)),
        ):
            row = start(script, folder, *options)
            print(f"{name}: {row['seconds']:.1f} s", flush=True)
            figures.setdefault(name, []).append(row)
    return figures


def format_table(results):
    """The figures as Markdown, medians."""
    lines = ["| start | UNet | to the picture, s | of which compiling or loading, s |"]
    lines.append("|---|---|---|---|")
    for size, row in results.items():
        for name, starts in row["figures"].items():
            middle = sorted(starts, key=lambda figure: figure["seconds"])[len(starts) // 2]
            told = middle["compile_seconds"]
            lines.append(
                f"| {name} | {size} | {middle['seconds']:.1f} | "
                f"{'' if told is None else f'{told:.2f}'} |"
            )
    return "\n".join(lines)


def run(config):
    """Make the model, measure, write, print."""
    if config.rounds < 1:
        raise ValueError(f"rounds={config.rounds} must be at least 1")
    results = read_results(config.output, "figures")
    machine = describe_machine(("jax", "jaxlib", "flax", "numpy"))
    with tempfile.TemporaryDirectory() as temporary:
        figures = bench(Path(temporary), config.size, config.rounds)
    results[config.size] = {"command": this_command(), "machine": machine, "figures": figures}
    write_json(results, config.output)
    print(f"\n{format_table(results)}\n\nwrote {config.output}")


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
