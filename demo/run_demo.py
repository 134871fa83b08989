"""The main job from end to end, small: data, widen, train, edit, measure. `make demo` runs this.

    python demo/run_demo.py                  # 4 minutes on 2 CPU cores with AVX-512
    python demo/run_demo.py --family sdxl    # SDXL; writes to demo/output_xl

Every step is a command line that is printed before it runs; they are the ones used on a TPU slice.
A CPU counts as two devices, as XLA runs the small operations of such a model on one core of each.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from diffusers_flax.command_line import run_main

FOLDERS = {  # base model and output
    "sd": ("demo/base_model", "demo/output"),
    "sdxl": ("demo/base_model_xl", "demo/output_xl"),
}
STEPS = (
    "demo/make_dataset.py --output_dir {output}",
    "parquet_processing.py --train_data_dir {output}/data --preview {output}/preview.png",
    "create_modified_unet.py --pretrained_model_name_or_path {base_model}"
    " --output_dir {output}/modified_unet --overwrite_output_dir",
    "flax_train_instruct_pix2pix.py --pretrained_model_name_or_path {base_model}"
    " --unet_model_name_or_path {output}/modified_unet --train_data_dir {output}/data"
    " --output_dir {output}/model --overwrite_output_dir"
    " --cache_latents {output}/latents --no_random_crop --checkpointing_steps 0"
    " --resolution 64 --train_batch_size 8 --max_train_steps 2000"
    " --learning_rate 3e-3 --lr_warmup_steps 50 --lr_scheduler cosine --ema_fraction 0.2",
    "edit_cli.py --model {output}/model --edits_jsonl {output}/held_out/edits.jsonl"
    " --resolution 64 --num_inference_steps 20 --guidance_scale 2 --image_guidance_scale 1.2"
    " --batch_size 18",
    "demo/evaluate.py --output_dir {output} --started {started}",
)


@dataclass(frozen=True)
class Config:
    family: Literal["sd", "sdxl"] = "sd"  # Stable Diffusion or SDXL


def run(config):
    """Run the steps in order; the first that fails ends the demo."""
    started = time.time()
    base_model, output = FOLDERS[config.family]
    # A cache of another VAE's latents would be refused.
    shutil.rmtree(ROOT / output / "latents", ignore_errors=True)
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    print("$ export JAX_NUM_CPU_DEVICES=2", flush=True)
    for step in STEPS:
        command = step.format(base_model=base_model, output=output, started=started)
        print(f"\n$ python {command}", flush=True)
        done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT)
        if done.returncode:
            sys.exit(done.returncode)


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted="run the same command again")


if __name__ == "__main__":
    main()
