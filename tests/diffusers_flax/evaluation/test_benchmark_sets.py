"""evaluate_edits.py --protocol on synthetic copies of the benchmarks' sets, in their layouts."""

import argparse
import importlib.util
import io
import json
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import photo
from PIL import Image
from tiny_models import make_tiny_clip, make_tiny_dino, make_tiny_pipeline, save_random_alexnet

import evaluate_edits
from diffusers_flax.evaluation.benchmark_sets import (
    FINAL_INDEX,
    add_final_turns,
    chained,
    magicbrush_shards,
    magicbrush_test,
    read_benchmark,
)
from diffusers_flax.evaluation.held_out import HeldOutPair, check_pairs
from diffusers_flax.evaluation.metrics import ssim
from diffusers_flax.evaluation.perceptual import Dino, Lpips
from diffusers_flax.evaluation.scoring import ResultScorer
from diffusers_flax.generating.clip import Clip
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline

SESSIONS = {"100": 1, "242679": 3, "307": 2}  # {session: its turns}
INSTRUCTION = "make it red"
SIMILARITIES = ("truth_similarity", "dino", "text_similarity")


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
    # The paper's CLIP-T does not use these.
    (folder / "global_descriptions.json").write_text(
        json.dumps(
            {session: dict.fromkeys(texts, "a field") for session, texts in captions.items()}
        )
    )


def write_networks(folder):
    make_tiny_pipeline(folder / "sd")
    make_tiny_clip(folder / "clip")
    make_tiny_dino(folder / "dino")


def evaluate(**given):
    """Run the program; return results.json's content."""
    given = {"model": "sd", "num_inference_steps": 2, "resolution": 32} | given
    given = {"clip_model": "clip", "dino_model": "dino"} | given
    words = []
    for name, value in given.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    evaluate_edits.main(words)
    return json.loads(Path(given["output_dir"], "results.json").read_text())


def png(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def array(image):
    return np.asarray(image, np.float64) / 255


@pytest.mark.slow
def test_magicbrush(tmp_path, monkeypatch, capsys):
    """Files, chained edits and numbers of all turns and of final turns."""
    monkeypatch.chdir(tmp_path)
    write_networks(tmp_path)
    write_magicbrush(Path("test"))
    save_random_alexnet(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    has_lpips = importlib.util.find_spec("lpips") is not None
    metrics = ("ssim", "lpips") if has_lpips else ("ssim",)
    given = dict(protocol="magicbrush", data_dir="test", output_dir="out", metrics=metrics)
    given |= dict(guidance_scale=3, seeds=(0, 5), batch_size=2)
    results = evaluate(**given)
    assert results["settings"]["protocol"] == "magicbrush"

    folder = Path("out/images", results["rows"][1]["images"])
    turns = [(session, turn) for session, n in SESSIONS.items() for turn in range(1, n + 1)]
    names = {f"{s}/{s}_{'1' if t == 1 else f'inde_{t}'}.png" for s, t in turns}
    names |= {f"{s}/{s}_iter_{t}.png" for s, t in turns if t > 1}
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
    clip, dino = Clip("clip"), Dino("dino")
    lpips = Lpips() if has_lpips else None
    pairs = [*magicbrush_test(Path("test"))]
    finals = [max(i for i, (s, _) in enumerate(turns) if s == session) for session in SESSIONS]
    settings = {
        "": [
            (i, f"{s}/{s}_{'1' if t == 1 else f'inde_{t}'}.png") for i, (s, t) in enumerate(turns)
        ],
        "_final": [
            (i, f"{s}/{s}_{'1' if t == 1 else f'iter_{t}'}.png") for i, (s, t) in enumerate(turns)
        ],
    }
    settings["_final"] = [settings["_final"][i] for i in finals]
    row = results["rows"][1]
    for part, compared in settings.items():
        values = {name: [] for name in ("l1", "mse", "ssim", "lpips")}
        for i, name in compared:
            truth = pairs[i].decoded("edited")
            result = Image.open(folder / name).resize(truth.size, Image.Resampling.BICUBIC)
            values["l1"].append(np.abs(array(result) - array(truth)).mean())
            values["mse"].append(np.square(array(result) - array(truth)).mean())
            values["ssim"].append(ssim(result, truth))
            values["lpips"].append(lpips.distance(result, truth) if has_lpips else np.nan)
        for name in ("l1", "mse", *metrics):
            assert row[name + part] == pytest.approx(np.mean(values[name]), abs=1e-4), name
        scorer = ResultScorer(pairs, SIMILARITIES, clip=clip, dino=dino)
        files = [Image.open(folder / name) for _, name in compared]
        for name, numbers in scorer.measure([i for i, _ in compared], files).items():
            assert row[name + part] == pytest.approx(np.mean(numbers), abs=1e-4), name
    copied = {x["baseline"]: x for x in results["baselines"]}["copied input"]
    images = Path("test/images")
    final = [
        np.abs(
            array(
                Image.open(images / s / f"{s}-input.png")
                .resize((32, 32), Image.Resampling.LANCZOS)
                .resize((48, 48), Image.Resampling.BICUBIC)
            )
            - array(Image.open(images / s / f"{s}-output{n}.png"))
        ).mean()
        for s, n in SESSIONS.items()
    ]
    assert copied["l1_final"] == pytest.approx(np.mean(final), abs=1e-5)

    table = Path("out/results.md").read_text()
    assert "All turns (single-turn), 6 pairs:" in table
    assert "Final turn (multi-turn), 3 pairs:" in table
    assert table.count("| image guidance | L1 | L2 | CLIP-I | DINO | CLIP-T | ") == 2
    mean = np.mean([row["l1_final"] for row in results["rows"]])
    assert f"| {mean:.4f} ± " in table
    with Image.open("out/best_and_worst.png") as image:
        assert image.width == 4 * (3 * 192 + 8) + 8  # four tiles of input, result and truth

    # Nothing is left to do, and other metrics are another evaluation.
    assert evaluate(**given) == results
    capsys.readouterr()
    with pytest.raises(SystemExit):
        evaluate(**given | {"metrics": "dino"})
    assert "metrics was" in capsys.readouterr().err


@pytest.mark.slow
def test_emu_edit(tmp_path, monkeypatch, capsys):
    """Shards without true images; a row without captions has fewer metrics."""
    monkeypatch.chdir(tmp_path)
    write_networks(tmp_path)
    photos = [photo(64, 64, i) for i in range(3)]
    Path("data").mkdir()
    rows = []
    for i, image in enumerate(photos):
        image.save("a.png")
        caption = f"an apple {i}" if i < 2 else ""
        rows.append(
            {"instruction": INSTRUCTION, "image": {"bytes": Path("a.png").read_bytes(), "path": ""}}
            | {"task": "color", "split": "test", "idx": i, "hash": "x"}
            | {"input_caption": caption, "output_caption": f"a red apple {i}"}
        )
    pq.write_table(pa.Table.from_pylist(rows), "data/test-00000.parquet")
    results = evaluate(protocol="emu_edit", data_dir="data", output_dir="out")
    printed = capsys.readouterr().out
    assert "left out for 1 of 3 pairs, without both captions: CLIP dir\n" in printed
    assert "| CLIP dir | CLIP-I | CLIP-T | DINO | L1 |" in printed
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
    assert results["baselines"][0]["dino_to_input"] == pytest.approx(1, abs=0.2)
    values = json.loads(Path("out/values", f"{row['images']}.json").read_text())
    assert values["direction_similarity"][2] is None and values["text_similarity"][2] is not None


def test_a_missing_mask_is_a_damaged_one(tmp_path):
    """It only matters if the edits need it."""
    write_magicbrush(tmp_path)
    sessions = json.loads((tmp_path / "edit_sessions.json").read_text())
    sessions["100"][0]["mask"] = "none.png"
    (tmp_path / "edit_sessions.json").write_text(json.dumps(sessions))
    pairs = read_set("magicbrush", tmp_path)
    assert check_pairs(pairs, use_masks=False)[0].mask is None
    with pytest.raises(ValueError, match=r"the mask of .*100"):
        check_pairs(pairs, use_masks=True)


def test_sessions_of_magicbrush(tmp_path):
    """The test's folder, the dev shards and a list have the same sessions."""
    write_magicbrush(tmp_path)
    pairs = add_final_turns(read_set("magicbrush", tmp_path))
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

    bare = [
        HeldOutPair(i, pair.input, pair.instruction, pair.original, pair.edited)
        for i, pair in enumerate(pairs[:6])
    ]
    listed = add_final_turns(chained(bare))
    assert [pair.after for pair in listed] == [pair.after for pair in pairs]
    assert listed[2].session == "000001" and listed[2].key == "000001/000001_inde_2"

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
    shards = add_final_turns([*magicbrush_shards(tmp_path)])
    assert [pair.key for pair in shards] == [pair.key for pair in pairs]
    assert [pair.edited_caption for pair in shards] == [pair.edited_caption for pair in pairs]
    # A session whose first turn is left out has no final turn.
    without = add_final_turns([pair for pair in pairs[:6] if pair.key != "307/307_1"])
    assert [pair.key for pair in without[5:]] == ["242679/242679_iter_2", "242679/242679_iter_3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [{"input": "a.png"}]}, "session x lacks the text 'output'"),
        ({"x": [{"input": "a.png", "output": "a.png", "instruction": "red"}]}, "No such file"),
        ({"x": [{"input": "../a.png", "output": "b", "instruction": "red"}]}, "is outside of"),
        ({"../x": []}, r"'\.\./x' cannot name a file"),
        ({"x": None}, "session x lacks the text 'input'"),
        ({}, "has no edit for --protocol magicbrush"),
        ([], "is not a JSON object"),
    ],
)
def test_a_damaged_magicbrush_is_one_line(tmp_path, change, message):
    (tmp_path / "edit_sessions.json").write_text(json.dumps(change))
    with pytest.raises(ValueError, match=message) as error:
        read_set("magicbrush", tmp_path)
    assert "\n" not in str(error.value)


def read_set(protocol, folder):
    """The pairs of a benchmark in a folder."""
    flags = argparse.Namespace(protocol=protocol, data_dir=str(folder), pairs_jsonl=None)
    flags.instruction_language, flags.max_pairs = "en", None
    return read_benchmark(flags)


def test_damaged_shards_and_lists_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"contains no \*\.parquet or \*\.arrow file"):
        read_set("gedit", tmp_path)
    pq.write_table(pa.table({"image": [b"x"], "instruction": ["red"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no column \w+; it has image, instruction: name"):
        read_set("magicbrush", tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
        read_set("emu_edit", tmp_path)
    for change, message in (
        ({"id": "../a.png"}, "is outside of"),
        ({"id": "no.png"}, "No such file"),
        ({"prompt": None}, "lacks the text 'prompt'"),
    ):
        edit = {"id": "adjust/000.jpg", "prompt": "red", "edit_type": "adjust"} | change
        (tmp_path / "basic_edit.json").write_text(json.dumps({"1": edit}))
        with pytest.raises(ValueError, match=message):
            read_set("imgedit", tmp_path)


def test_a_set_that_is_there_twice_is_refused(tmp_path):
    """Results of one name would overwrite each other."""
    row = {"task_type": "add", "key": "k", "instruction": "red", "instruction_language": "en"}
    row |= {"input_image_raw": b"x"}
    for name in "ab":
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match="has fullset/add/en/k 2 times; its results would"):
        read_set("gedit", tmp_path)
    (tmp_path / "b.parquet").unlink()
    (pair,) = read_set("gedit", tmp_path)
    assert pair.parts == ("",)


def test_a_protocol_keeps_pairs_of_two_shapes():
    """The programs of papers resize the result."""
    pairs = [HeldOutPair(0, "0.png", "red", *(png(photo(*x)) for x in ((32, 32), (48, 32))))]
    assert check_pairs(pairs, False, any_shape=True) == pairs
    with pytest.raises(ValueError, match="no pair is left"):
        check_pairs(pairs, False)
