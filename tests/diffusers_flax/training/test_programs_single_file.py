"""Programs whose models are single files: widening, training, editing."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import photo
from original_layout import (
    add_averages,
    original_layout,
    read_component,
    vae_layout,
    write_single_file,
)
from PIL import Image
from shards import write_random_shard
from tiny_models import make_tiny_pipeline
from trainer_runs import config_of

import cache_latents
import create_modified_unet
import distill_lcm
import edit_cli
import flax_train_instruct_pix2pix as trainer
from diffusers_flax.compiling.programs import EditProgramFlags, image_program
from diffusers_flax.generating.flags import with_single_files
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline


@pytest.mark.slow
@pytest.mark.usefixtures("lenient_optimizer")
def test_programs(tmp_path, capsys):
    """A text-to-image file is widened, trained from, and the result edits, as does a file of it."""
    folder = make_tiny_pipeline(
        tmp_path / "configs", in_channels=4, vae_channels=(16, 32), unet_channels=(16,)
    )
    file = write_single_file(tmp_path / "model.ckpt", add_averages(original_layout(folder), 0.01))
    flags = ["--pretrained_model_name_or_path", str(file), "--config_name_or_path", str(folder)]
    create_modified_unet.main([*flags, "--output_dir", str(tmp_path / "wide"), "--use_ema_weights"])
    wide = FlaxUNet2DConditionModel.from_pretrained(tmp_path / "wide")[1]
    narrow = FlaxUNet2DConditionModel.from_single_file(file, folder, use_ema_weights=True)[1]
    kernel = np.asarray(wide["conv_in"]["kernel"])
    assert (kernel[:, :, :4] == narrow["conv_in"]["kernel"]).all()

    (tmp_path / "data").mkdir()
    write_random_shard(tmp_path / "data" / "0.parquet", 16)
    outputs = []
    for name, source in (("from_file", str(file)), ("from_directory", str(folder))):
        config = config_of(
            source,
            tmp_path / "data",
            tmp_path / name,
            max_train_steps=2,
            lr_warmup_steps=0,
            config_name_or_path=str(folder) if source == str(file) else None,
        )
        trainer.train(replace(config, unet_model_name_or_path=str(tmp_path / "wide")))
        outputs.append(FlaxDiffusionPipeline.from_pretrained(tmp_path / name)[1])
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert saved["pretrained_model_name_or_path"] == source
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), *outputs))

    trained = write_single_file(
        tmp_path / "edit.safetensors", original_layout(tmp_path / "from_file")
    )
    photo(32, 32).save(tmp_path / "in.png")
    results = []
    for model in (["from_file"], [str(trained), "--config_name_or_path", str(folder)]):
        model[0] = str(tmp_path / model[0])
        flags = ["--input", str(tmp_path / "in.png"), "--edit", "make it red", "--resolution", "32"]
        flags += ["--num_inference_steps", "2", "--output", str(tmp_path / "out.png")]
        flags += ["--guidance_scale", "3", "--image_guidance_scale", "1.5"]  # a file has none
        edit_cli.main(["--model", *model, *flags, "--compilation_cache_dir", ""])
        results.append(np.asarray(Image.open(tmp_path / "out.png")))
    np.testing.assert_array_equal(*results)
    with pytest.raises(SystemExit):
        edit_cli.main(["--model", str(file), *flags, "--config_name_or_path", str(folder)])
    assert "is not an edit model (StableDiffusionPipeline)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("lenient_optimizer")
def test_latents_distillation_and_compilation(tmp_path):
    """cache_latents.py with the file of a VAE, distill_lcm.py and compile_for.py with a model's."""
    folder = make_tiny_pipeline(tmp_path / "configs", vae_channels=(16, 32), unet_channels=(16,))
    file = write_single_file(tmp_path / "model.safetensors", original_layout(folder))
    state, config = read_component(folder, "vae")
    vae = vae_layout(state, len(config["block_out_channels"]))
    vae = write_single_file(tmp_path / "vae.ckpt", vae)
    (tmp_path / "data").mkdir()
    write_random_shard(tmp_path / "data" / "0.parquet", 16)
    flags = f"--train_data_dir {tmp_path}/data --resolution 16".split()
    model = f"--pretrained_model_name_or_path {file} --config_name_or_path {folder}".split()
    cached = []
    for name, source in (
        ("a", ["--pretrained_model_name_or_path", str(folder)]),
        ("b", model),
        ("c", [*model, "--pretrained_vae_model_name_or_path", str(vae)]),
    ):
        cache_latents.main([*flags, *source, "--output_dir", str(tmp_path / name)])
        cached.append((tmp_path / name / "0.parquet").read_bytes())
    assert cached[0] == cached[1] == cached[2]

    flags += ["--max_train_steps", "1", "--train_batch_size", "4", "--lora_rank", "2"]
    flags += ["--output_dir", f"{tmp_path}/lora", "--compilation_cache_dir", ""]
    distill_lcm.main([*flags, *model])
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").exists()

    config = EditProgramFlags(
        tpu="v5e-1", pretrained_model_name_or_path=str(file), config_name_or_path=str(folder)
    )
    config = with_single_files(config, "pretrained_model_name_or_path")
    assert image_program(config, jax.devices()[:1]).batch_per_chip == 1
