"""The main job from end to end, small: data, widen, train, edit, measure. `make demo` runs this.

    python demo/run_demo.py          # about 10 minutes on 2 CPU cores

Every step is a command line that is printed before it runs; they are the ones used on a TPU slice.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = (
    "demo/make_dataset.py --output_dir demo/output",
    "parquet_processing.py --train_data_dir demo/output/data --preview demo/output/preview.png",
    "create_modified_unet.py --pretrained_model_name_or_path demo/base_model"
    " --output_dir demo/output/modified_unet",
    "flax_train_instruct_pix2pix.py --pretrained_model_name_or_path demo/base_model"
    " --unet_model_name_or_path demo/output/modified_unet --train_data_dir demo/output/data"
    " --output_dir demo/output/model --overwrite_output_dir"
    " --resolution 64 --train_batch_size 16 --max_train_steps 1500"
    " --learning_rate 1e-3 --lr_warmup_steps 50 --lr_scheduler cosine --ema_fraction 0.2",
    "edit_cli.py --model demo/output/model --edits_jsonl demo/output/held_out/edits.jsonl"
    " --resolution 64 --num_inference_steps 20 --guidance_scale 2 --image_guidance_scale 1.2"
    " --batch_size 24",
    "demo/evaluate.py --output_dir demo/output --started {started}",
)


def main():
    """Run the steps in order; the first that fails ends the demo."""
    started = time.time()
    for step in STEPS:
        command = step.format(started=started)
        print(f"\n$ python {command}", flush=True)
        done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
