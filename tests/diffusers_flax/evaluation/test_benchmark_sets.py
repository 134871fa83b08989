"""evaluate_edits.py --protocol on synthetic copies of the benchmarks' sets, in their layouts."""

import json
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluations import array, evaluate, png
from helpers import photo
from PIL import Image
from tiny_models import make_tiny_clip, make_tiny_dino, make_tiny_pipeline, make_tiny_xl

from diffusers_flax.evaluation.benchmark_sets import FINAL_INDEX, read_benchmark
from diffusers_flax.evaluation.metrics import ssim
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline

SESSIONS = {"100": 1, "242679": 3, "307": 2}  # {session: its turns}
INSTRUCTION = "make it red"


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """The working directory has tiny models."""
    monkeypatch.chdir(tmp_path)
    make_tiny_pipeline(tmp_path / "sd")
    make_tiny_clip(tmp_path / "clip")
    make_tiny_dino(tmp_path / "dino")
    return {"clip_model": "clip", "dino_model": "dino", "output_dir": "out"}


def write_magicbrush(folder, size=48):
    """The folder of MagicBrush's test, as its card and its evaluation describe it."""
    sessions, captions = {}, {}
    for number, (session, turns) in enumerate(SESSIONS.items()):
        images = folder / "images" / session
        images.mkdir(parents=True)
        photo(size, size, 100 * number).save(images / f"{session}-input.png")
        before, sessions[session] = f"{session}-input.png", []
        captions[session] = {}
        for turn in range(1, turns + 1):
            names = {"input": before, "output": f"{session}-output{turn}.png"}
            names["mask"] = f"{session}-mask{turn}.png"
            photo(size, size, 100 * number + turn).save(images / names["output"])
            mask = photo(size, size, turn).convert("RGBA")
            mask.paste((0, 0, 0, 0), (0, 0, size // 2, size))
            mask.save(images / names["mask"])
            sessions[session].append(names | {"instruction": f"{INSTRUCTION} {turn}"})
            captions[session][names["output"]] = f"a red apple {number} {turn}"
            before = names["output"]
    (folder / "edit_sessions.json").write_text(json.dumps(sessions))
    (folder / "local_descriptions.json").write_text(json.dumps(captions))


@pytest.mark.slow
def test_magicbrush(networks):
    """Files, chained edits and numbers of all turns and of final turns."""
    write_magicbrush(Path("test"))
    given = dict(protocol="magicbrush", data_dir="test", metrics="ssim")
    results = evaluate(**networks, **given, guidance_scale=3, seeds=(0, 5), batch_size=2)
    row = results["rows"][1]
    folder = Path("out/images", row["images"])
    turns = [(session, turn) for session, n in SESSIONS.items() for turn in range(1, n + 1)]

    def file_of(session, turn, word):
        return f"{session}/{session}_{'1' if turn == 1 else f'{word}_{turn}'}.png"

    names = {file_of(*turn, word) for turn in turns for word in ("inde", "iter")}
    assert {str(file.relative_to(folder)) for file in folder.rglob("*.png")} == names

    # Turn 2 of a session edits the true image in one setting, and the result in the other.
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained("sd")

    def edit(path, turn, index):
        image = Image.open(path).convert("RGB").resize((32, 32), Image.Resampling.LANCZOS)
        inputs = pipeline.prepare_inputs(f"{INSTRUCTION} {turn}", image)
        key = jax.random.fold_in(jax.random.key(5), index)[None]
        return pipeline.numpy_to_pil(pipeline(*inputs, params, key, 2, 3.0, 1.5).images)[0]

    session, images = folder / "242679", Path("test/images/242679")
    for path, turn, index, result in (
        (images / "242679-output1.png", 2, 2, "242679_inde_2.png"),
        (session / "242679_1.png", 2, FINAL_INDEX + 2, "242679_iter_2.png"),
        (session / "242679_iter_2.png", 3, FINAL_INDEX + 3, "242679_iter_3.png"),
    ):
        found = Image.open(session / result)
        assert np.abs(array(found) - array(edit(path, turn, index))).max() < 2 / 255, result

    # The numbers, image by image
    pairs = read_benchmark("magicbrush", Path("test"))
    finals = [i for i, (session, turn) in enumerate(turns) if turn == SESSIONS[session]]
    for part, word, places in (("", "inde", range(len(turns))), ("_final", "iter", finals)):
        files = [Image.open(folder / file_of(*turns[i], word)) for i in places]
        values = {name: [] for name in ("l1", "mse", "ssim")}
        for i, result in zip(places, files):
            truth = pairs[i].decoded("edited")
            result = result.resize(truth.size, Image.Resampling.BICUBIC)
            error = array(result) - array(truth)
            values["l1"].append(np.abs(error).mean())
            values["mse"].append(np.square(error).mean())
            values["ssim"].append(ssim(result, truth))
        for name, numbers in values.items():
            assert row[name + part] == pytest.approx(np.mean(numbers), abs=1e-4), name

    table = Path("out/results.md").read_text()
    assert "All turns (single-turn), 6 pairs:" in table
    assert "Final turn (multi-turn), 3 pairs:" in table
    assert table.count("| image guidance | L1 | L2 | CLIP-I | DINO | CLIP-T | SSIM |") == 2
    mean = np.mean([row["l1_final"] for row in results["rows"]])
    assert f"| {mean:.4f} ± " in table


@pytest.mark.slow
def test_emu_edit(networks):
    """A model of SDXL; shards without true images; a row without captions has fewer metrics."""
    make_tiny_xl(Path("xl"), edits=True)
    photos = [photo(64, 64, i) for i in range(3)]
    rows = [
        {"instruction": INSTRUCTION, "image": {"bytes": png(image), "path": ""}}
        | {"task": "color", "split": "test", "idx": i, "hash": "x"}
        | {"input_caption": "an apple" * (i < 2), "output_caption": f"a red apple {i}"}
        for i, image in enumerate(photos)
    ]
    Path("data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), "data/test-00000.parquet")
    results = evaluate(**networks, model="xl", protocol="emu_edit", data_dir="data")
    assert results["models"]["xl"]["parameters"]["text_encoder_2"] > 0
    table = Path("out/results.md").read_text()
    assert "| CLIP dir | CLIP-I | CLIP-T | DINO | L1 |" in table
    (row,) = results["rows"]
    folder = Path("out/images", row["images"])
    changes = [
        np.abs(array(Image.open(folder / f"{i}.png").resize((64, 64))) - array(image)).mean()
        for i, image in enumerate(photos)
    ]
    assert row["l1_to_input"] == pytest.approx(np.mean(changes), abs=1e-4)
    assert [x["baseline"] for x in results["baselines"]] == [
        *("copied input", "VAE round trip of the input")
    ]


def test_sessions_of_magicbrush(tmp_path):
    """The test's folder and the dev shards have the same sessions."""
    write_magicbrush(tmp_path)
    pairs = read_benchmark("magicbrush", tmp_path)
    assert [pair.key for pair in pairs] == [
        *("100/100_1", "242679/242679_1", "242679/242679_inde_2", "242679/242679_inde_3"),
        *("307/307_1", "307/307_inde_2"),
        *("242679/242679_iter_2", "242679/242679_iter_3", "307/307_iter_2"),
    ]
    assert [pair.after for pair in pairs] == [*[None] * 6, 1, 6, 4]
    both, final = ("", "_final"), ("_final",)
    assert [pair.parts for pair in pairs] == [both, *[("",)] * 5, (), final, final]
    assert pairs[2].edited_caption == "a red apple 1 2" == pairs[6].edited_caption
    assert pairs[3].original == pairs[2].edited and pairs[7].original == pairs[1].original
    assert len({pair.index for pair in pairs}) == 9 and all(pair.mask for pair in pairs)

    cells = [
        {"img_id": pair.session, "turn_index": pair.turn, "instruction": pair.instruction}
        | {
            name: {"bytes": data, "path": None}
            for name, data in (
                *(("source_img", pair.original), ("mask_img", pair.mask)),
                ("target_img", pair.edited),
            )
        }
        for pair in pairs[:6]
    ]
    pq.write_table(pa.Table.from_pylist(cells), tmp_path / "dev.parquet")
    (tmp_path / "edit_sessions.json").unlink()
    shards = read_benchmark("magicbrush", tmp_path)
    assert [pair.key for pair in shards] == [pair.key for pair in pairs]
    assert [pair.edited_caption for pair in shards] == [pair.edited_caption for pair in pairs]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [{"output": "b"}]}, "is not the set of --protocol magicbrush: KeyError"),
        ({"x": [{"input": "../a.png", "output": "b", "instruction": "red"}]}, "is outside of"),
    ],
)
def test_a_damaged_magicbrush_is_one_line(tmp_path, change, message):
    (tmp_path / "images" / "x").mkdir(parents=True)
    (tmp_path / "images" / "x" / "b").touch()
    (tmp_path / "edit_sessions.json").write_text(json.dumps(change))
    with pytest.raises(ValueError, match=message):
        read_benchmark("magicbrush", tmp_path)


def test_keys_of_results_are_names_and_differ(tmp_path):
    """Results of one name would overwrite each other."""
    row = {"task_type": "add", "key": "k", "instruction": "red", "instruction_language": "en"}
    row |= {"input_image_raw": b"x"}
    for name in "ab":
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match="has 'fullset/add/en/k' 2 times; name the set once"):
        read_benchmark("gedit", tmp_path)
    (tmp_path / "b.parquet").unlink()
    (pair,) = read_benchmark("gedit", tmp_path)
    assert pair.parts == ("",)
    pq.write_table(pa.Table.from_pylist([row | {"key": "../k"}]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"\.\./k' 1 times"):
        read_benchmark("gedit", tmp_path)
