"""evaluate_edits.py by its command line: numbers, FLOPs, resuming, refusals."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from evaluations import array, evaluate, flags, refused
from helpers import photo
from PIL import Image
from tiny_models import make_tiny_clip, make_tiny_pipeline
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextModel

import edit_cli
from diffusers_flax.acceleration.plans import parse
from diffusers_flax.data.images import decode_image
from diffusers_flax.data.writing import SCHEMA, image_cell
from diffusers_flax.evaluation import measuring
from diffusers_flax.evaluation.measuring import count_edit_flops
from diffusers_flax.evaluation.metrics import ssim
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.pipelines.sampling import timestep_options

PROMPTS = ("make it red", "make it redder", "paint it red")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and CLIP, shards of three pairs in data, the third without captions."""
    folder = tmp_path_factory.mktemp("evaluate")
    make_tiny_pipeline(folder / "sd")
    make_tiny_clip(folder / "clip")
    rows = []
    for i, prompt in enumerate(PROMPTS):
        for name in ("before", "after"):
            photo(48, 48, 10 * i + (name == "after")).save(folder / f"{name}{i}.png")
        rows.append(
            {
                "original_prompt": f"an apple {i}" if i < 2 else None,
                "original_image": image_cell(folder / f"before{i}.png"),
                "edit_prompt": prompt,
                "edited_prompt": f"a red apple {i}",
                "edited_image": image_cell(folder / f"after{i}.png"),
            }
        )
    (folder / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / "data" / "a.parquet")
    return folder


@pytest.mark.slow
def test_flops_count_every_branch_and_step(folder):
    """Beside PyTorch's count of matmuls and convolutions, which leaves the rest out."""
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(folder / "sd")
    shapes = jax.eval_shape(lambda: params)

    parts = {
        "unet": UNet2DConditionModel.from_pretrained(folder / "sd" / "unet"),
        "vae": AutoencoderKL.from_pretrained(folder / "sd" / "vae"),
        "text_encoder": CLIPTextModel.from_pretrained(
            folder / "sd" / "text_encoder", attn_implementation="eager"
        ),
    }
    for name in ("unet", "vae"):
        parts[name].set_attn_processor(AttnProcessor())  # of matmuls, which the counter knows

    def theirs(part, *args, method="forward"):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            getattr(parts[part], method)(*args)
        return counter.get_total_flops()

    text = theirs("text_encoder", torch.zeros(1, 77, dtype=int))
    rest = theirs("vae", torch.zeros(1, 3, 64, 64), method="encode")
    rest += theirs("vae", torch.zeros(1, 4, 16, 16), method="decode")

    def unet(B):
        return theirs("unet", torch.zeros(B, 8, 16, 16), 0, torch.zeros(B, 77, 24))

    kernels = dict(parts["unet"].named_parameters())
    of_text_states = (
        2
        * 77
        * sum(
            x.numel() for name, x in kernels.items() if re.search(r"attn2\.to_[kv]\.weight", name)
        )
    )
    every = ("text", "image", "null")
    for branches, num_texts in (every, 2), (("text",), 1):  # with and without the null text
        step = unet(len(branches))
        steps = timestep_options(9, None, None)
        found = count_edit_flops(pipeline, shapes, branches, steps, (64, 64))
        # The text's keys and values do not change: they are computed once, not in 8 further steps.
        kept = 8 * len(branches) * of_text_states
        assert found == pytest.approx(num_texts * text + rest + 9 * step - kept)

    # 4 of 12 steps of Spectrum are forecasts; guidance in a third and two thirds of the steps
    steps = timestep_options(12, None, None)
    # rows: of the UNet, in all steps but the first one with these branches
    for names, (expected, rows) in {
        ("spectrum",): (8 * unet(3), 7 * 3),
        ("guidance:image_stop=0.34,stop=0.67",): (
            5 * unet(3) + 4 * unet(2) + 3 * unet(1),
            4 * 3 + 3 * 2 + 2,
        ),
    }.items():
        expected -= rows * of_text_states
        accelerated = dataclasses.replace(pipeline, accelerate=parse(names))
        found = count_edit_flops(accelerated, shapes, every, steps, (64, 64))
        # with the forecast's own
        assert found == pytest.approx(2 * text + rest + expected, rel=1e-4)


def test_a_model_on_parquet_shards(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    results = evaluate(
        data_dir="data",
        output_dir=out,
        clip_model="clip",
        metrics="ssim",
        guidance_scale=3,
        image_guidance_scale=(1.5, 2),
        seeds=(0, 5),
    )
    assert {file.name for file in out.iterdir() if file.is_file()} == {
        *("results.json", "results.md", "curve.png", "grid.png", "best_and_worst.png")
    }
    keys = [(r["model"], r["image_guidance_scale"], r["seed"]) for r in results["rows"]]
    assert keys == [("sd", s, seed) for s in (1.5, 2.0) for seed in (0, 5)]
    table = (out / "results.md").read_text()
    assert "| direction sim. | text sim. | truth sim. | SSIM |" in table
    assert table.count("\n| sd |") == 4  # of metrics and of costs, for each image guidance
    assert results["models"]["sd"]["parameters"]["text_encoder"] > 0
    for row in results["rows"]:
        assert row["num_pairs"] == 3 and row["seconds_per_edit"] > 0 and row["flops_per_edit"] > 0
        assert row["peak_memory_of"] == "process" and row["peak_memory_bytes"] > 1e8
    assert [row["compile_seconds"] > 0 for row in results["rows"]] == [True, *[False] * 3]

    # The baselines, in closed form and through the loader's own decoding
    cells = pq.read_table("data").to_pylist()
    before, after = (
        [
            Image.fromarray(decode_image(cell[name]["bytes"])).resize(
                (32, 32), Image.Resampling.LANCZOS
            )
            for cell in cells
        ]
        for name in ("original_image", "edited_image")
    )
    baselines = {(r["baseline"], r["model"]): r for r in results["baselines"]}
    assert len(baselines) == 4
    change = np.mean([np.abs(array(a) - array(b)).mean() for a, b in zip(before, after)])
    copied, truth = baselines["copied input", None], baselines["truth", None]
    assert copied["l1"] == pytest.approx(change) == truth["l1_to_input"]
    assert copied["image_similarity"] == pytest.approx(1)
    assert (copied["direction_similarity"], truth["mse"], copied["error_ratio"]) == (0, 0, 1)
    assert 0 < baselines["VAE round trip of the truth", "sd"]["l1"] < 1

    # A row, edit by edit, by the pipeline
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained("sd")
    edits = []
    for i, (image, prompt) in enumerate(zip(before, PROMPTS)):
        key = jax.random.fold_in(jax.random.key(5), i)[None]
        inputs = pipeline.prepare_inputs(prompt, image)
        edit = pipeline(*inputs, params, key, 2, 3.0, 1.5).images
        edits.append(pipeline.numpy_to_pil(edit)[0])
    row = results["rows"][1]
    shown = [Image.open(out / "images" / row["images"] / f"{i}.png") for i in range(3)]
    for image, edit in zip(shown, edits):
        assert np.abs(array(image) - array(edit)).max() < 2 / 255
    errors = [array(a) - array(b) for a, b in zip(edits, after)]
    assert row["l1"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-3)
    assert row["mse"] == pytest.approx(np.mean(np.square(errors)), rel=1e-3)
    assert row["ssim"] == pytest.approx(np.mean([*map(ssim, shown, after)]), abs=1e-4)
    with Image.open(out / "grid.png") as grid:  # input, truth and result for three pairs
        assert grid.width == 3 * 200 + 8
        assert grid.height > 3 * 200 + 8


def write_jsonl(path, num_pairs=2, drop=(), **changes):
    """Write a list of pairs of the fixture's images."""
    rows = []
    for i in range(num_pairs):
        row = {"input": f"before{i}.png", "instruction": PROMPTS[i], "truth": f"after{i}.png"}
        row |= {"input_caption": "an apple", "output_caption": "a red apple"}
        rows.append({k: v for k, v in (row | changes).items() if k not in drop})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.slow
def test_references_of_pairs(folder, tmp_path, monkeypatch):
    """Of a list, as edit_cli.py's; the next row's in shards; other models do not see them."""
    monkeypatch.chdir(folder)
    sees = make_tiny_pipeline(tmp_path / "sees", in_channels=12)
    rows, listed = pq.read_table("data").to_pylist()[:2], []
    for i, row in enumerate(rows):
        row["hat"] = image_cell(folder / f"after{1 - i}.png")
        listed.append(dict(input=f"before{i}.png", edit=PROMPTS[i], reference=f"after{i}.png"))
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "a.parquet")
    (folder / "with.jsonl").write_text("\n".join(map(json.dumps, listed)))
    shards = {"data_dir": tmp_path / "data", "reference_image_column": "hat"}
    sources = {
        "list": {"model": (sees, "sd"), "pairs_jsonl": "with.jsonl"},
        "shards": {"model": sees, "wrong_reference": ()} | shards,
    }
    edits = []
    for name, source in sources.items():
        given = {"clip_model": "", "output_dir": tmp_path / name}
        for row in evaluate(**given, **source)["rows"]:
            edits.append(Image.open(tmp_path / name / "images" / row["images"] / "0.png").tobytes())
    assert edits[0] == edits[2]
    given = dict(edit=PROMPTS[0], input="before0.png", output=tmp_path / "edit.png")
    for model, reference, edit in (sees, "after0.png", edits[0]), ("sd", None, edits[1]):
        edit_cli.main(flags(model=model, reference=reference, **given))
        assert Image.open(tmp_path / "edit.png").tobytes() == edit


@pytest.mark.slow
def test_resume_computes_only_missing_rows(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    make_tiny_pipeline(tmp_path / "model")
    out, embedding = tmp_path / "out", tmp_path / "red.bin"
    torch.save({"<red>": torch.randn(2, 24)}, embedding)
    pairs = write_jsonl(tmp_path / "p.jsonl", instruction="make it <red>")
    given = {"model": tmp_path / "model", "pairs_jsonl": pairs, "output_dir": out}
    given |= {"clip_model": "", "guidance_scale": 2, "embedding": embedding}
    (row,) = evaluate(**given)["rows"]

    seeds = []
    measure_edits = measuring.Evaluation.measure_edits
    monkeypatch.setattr(
        measuring.Evaluation,
        "measure_edits",
        lambda self, models, sampling, *args: (
            seeds.append(sampling.seed) or measure_edits(self, models, sampling, *args)
        ),
    )
    results = evaluate(**given, seeds=(0, 1))
    assert seeds == [1]
    assert results["rows"][0] == row and len(results["rows"]) == 2

    monkeypatch.setattr(measuring, "load_weights", None)  # nothing is left to do
    assert evaluate(**given) == results
    for change, message in (
        ({"num_inference_steps": 3}, "num_inference_steps was 2 and is 3"),
        ({"clip_model": "clip"}, "clip_model was and is clip"),
        (
            {"pairs_jsonl": write_jsonl(tmp_path / "q.jsonl", instruction="other")},
            "checksum of the pairs was",
        ),
    ):
        assert message in refused(capsys, **given | change)
    torch.save({"<red>": torch.randn(2, 24)}, embedding)
    assert "files of these flags was" in refused(capsys, **given)
    make_tiny_pipeline(tmp_path / "model", seed=1)
    assert f"--model {tmp_path / 'model'} has other files" in refused(capsys, **given)


TCD = {"scheduler": "tcd", "timesteps": ("900", "500", "100"), "eta": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "few",
    [TCD | {"accelerate": ("guidance:stop=0.5", "tome")}, {"guidance": "apg:norm=1"}],
)
def test_edits_are_those_of_edit_cli(folder, tmp_path, monkeypatch, few):
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    given = {"pairs_jsonl": write_jsonl(tmp_path / "p.jsonl", 1), "output_dir": out}
    (row,) = evaluate(**given, **few, clip_model="")["rows"]
    edit_cli.main(flags(input="before0.png", edit=PROMPTS[0], output=tmp_path / "a.png", **few))
    with Image.open(out / "images" / row["images"] / "0.png") as image:
        assert image.tobytes() == Image.open(tmp_path / "a.png").tobytes()


@pytest.mark.slow
def test_without_truth_and_captions(folder, tmp_path, monkeypatch):
    """Images of two sizes; the report leaves metrics out."""
    monkeypatch.chdir(folder)
    photo(48, 24).save(tmp_path / "wide.png")
    pairs = write_jsonl(folder / "p.jsonl", drop=("truth", "input_caption", "output_caption"))
    line = {"input": str(tmp_path / "wide.png"), "edit": "make it red"}
    pairs.write_text(pairs.read_text() + json.dumps(line) + "\n")
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("of something else")
    given = {"pairs_jsonl": pairs, "output_dir": out, "clip_model": "clip"}
    given |= {"guidance_scale": 1, "image_guidance_scale": 1}
    results = evaluate(**given, overwrite_output_dir=())
    (row,) = results["rows"]
    assert row["l1"] is row["text_similarity"] is row["direction_similarity"] is None
    assert -1 <= row["image_similarity"] <= 1 and row["l1_to_input"] > 0
    table = (out / "results.md").read_text()
    assert "| model | guidance | image guidance | L1 to input | image sim. |\n" in table
    assert not (out / "curve.png").exists()
    assert [row["baseline"] for row in results["baselines"]] == [
        *("copied input", "VAE round trip of the input")
    ]
    with Image.open(out / "images" / row["images"] / "2.png") as image:
        assert image.size == (32, 16)


@pytest.mark.variants
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs_jsonl": "text.jsonl"}, "text.jsonl: no known image format"),
        ({"model": "narrow"}, "narrow is not an edit model (StableDiffusionPipeline)"),
        ({"output_dir": "file/out"}, "no directory that you can write to"),
        ({"clip_model": "sd/vae"}, "--clip_model sd/vae cannot be opened: "),
        ({"use_masks": ()}, "no pair has a mask"),
        ({"judge": "http://x/v1"}, "--judge goes with --judge_model and --protocol gedit or"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    for name in ("sd", "clip", "data", "before0.png", "after0.png"):
        Path(name).symlink_to(folder / name)
    if change.get("model") == "narrow":
        make_tiny_pipeline("narrow", in_channels=4)
    Path("file").write_text("no directory")
    write_jsonl(Path("p.jsonl"), 1)
    write_jsonl(Path("text.jsonl"), 1, input="text.jsonl")
    monkeypatch.setattr(measuring, "load_weights", None)
    given = {"pairs_jsonl": "p.jsonl", "output_dir": "out", "clip_model": "clip"}
    assert message in refused(capsys, **given | change)
    assert not Path("out").exists()


@pytest.mark.slow
def test_inside_and_outside_of_masks(folder, tmp_path, monkeypatch):
    """MagicBrush's columns: a mask is the image with a hole, of any size, or missing."""
    monkeypatch.chdir(folder)
    rows, hole = [], np.zeros((96, 96), bool)
    hole[:, 24:] = True
    for i in range(3):
        pixels = np.asarray(photo(96, 96, i).convert("RGBA")).copy()
        pixels[..., 3] = np.where(hole, 0, 255)
        Image.fromarray(pixels).save(tmp_path / f"mask{i}.png")
        images = {
            "source_img": image_cell(folder / f"before{i}.png"),
            "mask_img": image_cell(tmp_path / f"mask{i}.png") if i < 2 else None,
            "instruction": PROMPTS[i],
            "target_img": image_cell(folder / f"after{i}.png"),
        }
        rows.append(images)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "a.parquet")
    given = dict(data_dir=tmp_path / "data", clip_model="", max_pairs=2)
    given |= dict(original_image_column="source_img", edited_image_column="target_img")
    given |= dict(edit_prompt_column="instruction")

    found = evaluate(output_dir=tmp_path / "free", **given)
    (row,) = found["rows"]
    inside = 0.75  # of the pixels
    for name in ("l1", "mse", "l1_to_input"):
        parts = inside * row[f"{name}_inside"] + (1 - inside) * row[f"{name}_outside"]
        assert row[name] == pytest.approx(parts, rel=1e-5)
    assert row["l1_to_input_outside"] > 0.01
    copied, truth, *_ = found["baselines"]
    assert copied["error_ratio_inside"] == copied["error_ratio_outside"] == 1
    assert truth["l1_inside"] == truth["error_ratio_outside"] == 0
    table = (tmp_path / "free" / "results.md").read_text()
    assert "Inside of the masks, 2 pairs:" in table
    assert "Outside of the masks, 2 pairs:" in table

    given |= {"max_pairs": 3}
    masked = evaluate(output_dir=tmp_path / "masked", use_masks=(), **given)["rows"][0]
    assert masked["l1_to_input_outside"] == 0
    assert masked["l1_to_input_inside"] == pytest.approx(row["l1_to_input_inside"], rel=0.3)
