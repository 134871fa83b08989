"""make_pairs.py by its command line: its pairs are of the pipelines' calls, on any devices, after
kills and mistakes."""

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT, files_of
from PIL import Image
from references import open_ours
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_clip, make_tiny_pipeline

import cache_latents
import create_modified_unet
import flax_train_instruct_pix2pix
import make_pairs
import parquet_processing
from diffusers_flax import FlaxStableDiffusionPipeline
from diffusers_flax.generating.clip import Clip
from diffusers_flax.images import to_pil
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.clip_similarities import FlaxCLIPModel
from diffusers_flax.pairing.caption_lists import Caption, read_captions
from diffusers_flax.pairing.pair_scores import PairScorer, Scores
from diffusers_flax.pairing.samples import draw_sample

MODEL, XL = str(ROOT / "demo/base_model"), str(ROOT / "demo/base_model_xl")
SUBJECTS = ("the moon", "a flower", "a galaxy", "a cat", "a brick wall")
ROWS = [
    {
        "input": f"a photo of {x}",
        "edit": "turn day into night",
        "output": f"a photo of {x} at night",
    }
    for x in SUBJECTS
]
LOWEST = ["--min_clip_text=-1", "--min_clip_image=-1", "--min_clip_direction=-1"]
SCORES = Scores._fields


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A tiny CLIP."""
    folder = tmp_path_factory.mktemp("clip") / "clip"
    make_tiny_clip(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def inputs(tmp_path, monkeypatch):
    """The working directory, with lists of captions."""
    monkeypatch.chdir(tmp_path)
    write("captions.jsonl", ROWS)
    write("two.jsonl", ROWS[:2])


def write(name, rows):
    text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows)
    Path(name).write_text(text, encoding="utf-8")


def flags_of(clip, *words, captions="two.jsonl", model=MODEL, output="data", steps=2):
    """A command line: few samples and steps, all pairs good; later words win."""
    flags = ["--captions", captions, "--model", model, "--clip_model", clip]
    flags += ["--output_dir", output, "--num_samples", "3", "--batch_size", "2"]
    flags += ["--num_inference_steps", str(steps), "--lines_per_shard", "2", *LOWEST]
    for word in words:  # a flag that is given again replaces the default
        name = word.partition("=")[0]
        places = [i for i, x in enumerate(flags) if x.partition("=")[0] == name]
        for i in reversed(places if name.startswith("--") else ()):
            del flags[i : i + (1 if "=" in flags[i] else 2)]
    return [*flags, *words]


def run(clip, *words, **options):
    make_pairs.main(flags_of(clip, *words, **options))


def rows_of(folder="data"):
    """All rows of a directory's shards."""
    return [row for file in shards_of(folder) for row in pq.read_table(file).to_pylist()]


def shards_of(folder):
    return sorted(Path(folder).glob("[!.]*.parquet"))


def shards(folder):
    """{name: bytes} of the shards, and nothing that is unfinished."""
    found = files_of(Path(folder))
    assert not [file for file in found if ".unfinished" in str(file)]
    return {str(file): data for file, data in found.items() if file.suffix == ".parquet"}


def refused(capsys, *flags):
    """The one line of an error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        make_pairs.main([*flags])
    said = capsys.readouterr().err
    lines = [x for x in said.splitlines() if not x.startswith(("compiling", "making", "\r"))]
    assert stop.value.code == 2, said
    errors = [x for x in lines if "error:" in x]
    assert len(errors) == 1 and errors[0] == lines[-1], said
    return errors[0].rpartition("error: ")[2]


def on_devices(monkeypatch, number):
    """Let the program see some of the four devices."""
    devices = jax.devices()[:number]
    monkeypatch.setattr(jax, "local_devices", lambda *args, **options: devices)


# ------------------------------------------------------------------ processes

# The threads among which XLA divides matmuls are the same in all processes: four devices have four.
THREADS = str(max(4, os.cpu_count()))
# Ends itself by SIGKILL when it writes its second shard.
KILLED = """
import os, signal
import make_pairs
from diffusers_flax.pairing.pair_shards import PairShards
write, written = PairShards.write, []
def write_or_die(*arguments):
    if written:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(write(*arguments))
PairShards.write = write_or_die
make_pairs.main()
"""


def command(flags, num_devices, code="import make_pairs; make_pairs.main()"):
    """Start the program in a new process."""
    flag = "--xla_force_host_platform_device_count="
    others = [x for x in os.environ["XLA_FLAGS"].split() if not x.startswith(flag)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "NPROC": THREADS}
    environment["XLA_FLAGS"] = " ".join([*others, f"{flag}{num_devices}"])
    words = [sys.executable, "-c", code, *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(words, env=environment, **pipes)


def finish(process, code=0):
    """Wait for a process; returns (stdout, stderr)."""
    printed = process.communicate(timeout=300)
    assert process.returncode == code, printed[1]
    return printed


@pytest.mark.slow
def test_a_killed_run_on_two_devices_goes_on_with_one(clip, monkeypatch, capsys):
    """Its shards are those of a run on one device without a kill."""
    killed = command(flags_of(clip, "--lines_per_shard", "1"), 2, KILLED)
    finish(killed, -signal.SIGKILL)
    assert [file.name for file in shards_of("data")] == ["train-00000-of-00002.parquet"]
    assert Path("data/.unfinished").exists()
    first = shards_of("data")[0].read_bytes()
    on_devices(monkeypatch, 1)
    run(clip, "--lines_per_shard", "1")
    run(clip, "--lines_per_shard", "1", output="alone")
    assert "6 pairs of 2 lines are kept" in capsys.readouterr().out
    assert shards_of("data")[0].read_bytes() == first
    assert shards("data") == shards("alone")


@pytest.mark.slow
def test_devices_and_workers_do_not_change_a_bit(clip):
    """1 and 4 devices; two workers that write into one directory at the same time."""
    many = ("--num_samples", "7", "--lines_per_shard", "1")
    options = dict(captions="captions.jsonl", steps=20)
    for number in (1, 4):
        finish(command(flags_of(clip, *many, output=f"on-{number}", **options), number))
    expected = shards("on-1")
    assert len(expected) == 5 and len(rows_of("on-1")) == 20
    assert shards("on-4") == expected
    workers = [
        flags_of(clip, *many, "--worker", str(x), "--num_workers", "2", output="shared", **options)
        for x in range(2)
    ]
    for process in [command(flags, 1 + number) for number, flags in enumerate(workers)]:
        finish(process)
    assert shards("shared") == expected
    reports = sorted(file.name for file in Path("shared").glob("report*"))
    assert reports == ["report-0.json", "report-1.json"]


# ------------------------------------------------------------------ pairs


def encoded(image):
    """A JPEG file of the highest quality that the program writes."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def call(numbers, **options):
    """The Samples (place, number), and their PIL images by the pipeline's call."""
    pipeline, params = open_ours(MODEL, "euler_ancestral", FlaxStableDiffusionPipeline)
    samples = [draw_sample(3, *x, (7.5, 15.0), (0.1, 0.9)) for x in numbers]
    texts = [ROWS[x.place][key] for x in samples for key in ("input", "output")]
    ids = pipeline.prepare_inputs(texts)
    images = pipeline(
        ids,
        params,
        np.repeat([x.key for x in samples], 2, axis=0),
        guidance_scale=np.repeat(np.float32([x.guidance_scale for x in samples]), 2),
        attention_sharing=np.repeat(np.float32([x.attention_sharing for x in samples]), 2),
        **options,
    ).images
    return samples, to_pil(np.asarray(images))


def test_pairs_are_those_of_the_pipeline(clip, monkeypatch):
    """Each row has the files, settings and scores of its sample."""
    on_devices(monkeypatch, 1)
    run(clip, "--keep_all", "--seed", "3", "--num_samples", "2")
    rows = rows_of()
    assert [(row["line"], row["sample"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for place in (0, 1):
        samples, images = call([(place, 0), (place, 1)], num_inference_steps=2)
        for row, sample, pair in zip(rows[2 * place :], samples, (images[:2], images[2:])):
            files = [row["original_image"]["bytes"], row["edited_image"]["bytes"]]
            assert files == list(map(encoded, pair))
            texts = row["original_prompt"], row["edit_prompt"], row["edited_prompt"]
            assert texts == tuple(ROWS[place].values())
            assert row["guidance_scale"] == sample.guidance_scale
            assert row["attention_sharing"] == sample.attention_sharing
            scores = PairScorer(Clip(clip), [Caption(1, *texts)])(pair, [0], 0)
            assert np.allclose([row[x] for x in SCORES], scores[0], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_scores_choose_pairs_now_or_later(clip):
    """With thresholds that some reach: --keep_all and parquet_processing.py choose the pairs
    of a run without it; --early_stop the first good ones."""
    options = dict(captions="captions.jsonl")
    run(clip, "--keep_all", "--num_samples", "9", output="all", **options)
    rows = rows_of("all")
    assert len(rows) == 45
    lowest = [min(row[x] for x in SCORES[:2]) for row in rows]
    values = [lowest, *([row[x] for row in rows] for x in SCORES[2:])]
    names = ("min_clip_text", "min_clip_image", "min_clip_direction")
    thresholds = dict(zip(names, (float(np.quantile(x, 0.25)) for x in values)))
    good = [
        row
        for row, *scores in zip(rows, *values)
        if all(score >= least for score, least in zip(scores, thresholds.values()))
    ]
    lines = sorted({row["line"] for row in good})
    assert 5 < len(good) < 40 and len(good) > 2 * len(lines) > 2
    flags = [f"--{name}={value!r}" for name, value in thresholds.items()]
    key = lambda row: (row["line"], row["sample"])  # noqa: E731

    run(clip, "--num_samples", "9", "--num_kept", "2", *flags, output="best", **options)
    words = ["--pairs", "all", "--output_dir", "chosen", "--num_kept", "2", *flags]
    parquet_processing.main([*words, "--preview", ""])
    assert sorted(rows_of("best"), key=key) == sorted(rows_of("chosen"), key=key)
    best = [
        row
        for line in lines
        for row in sorted(
            (row for row in good if row["line"] == line), key=lambda row: -row["clip_direction"]
        )[:2]
    ]
    assert sorted(rows_of("best"), key=key) == sorted(best, key=key)

    words = ["--num_samples", "9", "--num_kept", "2", *flags, "--early_stop"]
    run(clip, *words, output="early", **options)
    first = [row for line in lines for row in [x for x in good if x["line"] == line][:2]]
    assert sorted(rows_of("early"), key=key) == first
    report = json.loads(Path("early/report.json").read_text())
    assert report["samples"] < 45 and report["kept"] == len(first)
    for line in lines:
        numbers = [row["sample"] for row in first if row["line"] == line]
        assert len(numbers) <= 2


def test_previews_reports_and_warnings(clip, monkeypatch, capsys):
    """Of lines without good pairs the best one is shown; the threshold that failed is named."""
    on_devices(monkeypatch, 1)
    run(clip, "--min_clip_image", "1", "--preview")
    said = capsys.readouterr()
    assert "0 pairs of 2 lines are kept; 0 of 6 samples reach the thresholds" in said.out
    assert "next:" not in said.out
    assert "lines without a good sample: 1, 2; samples miss" in said.out
    assert "--min_clip_image by 6" in said.out
    for line in (1, 2):
        with Image.open(f"data/previews/00000000{line}.jpg") as image:
            assert image.width > 128
    assert "12 images of 64x64 pixels, 4 at once on each of 1 cpu" in said.err
    report = json.loads(Path("data/report.json").read_text())
    assert (report["samples"], report["kept"], report["missed"]["min_clip_image"]) == (6, 0, 6)
    run(clip, "--min_clip_image", "1", "--preview")  # finished: opens no model
    said = capsys.readouterr()
    assert "0 pairs of 2 lines are kept" in said.out and "compiling" not in said.err
    run(clip, "--worker", "8", "--num_workers", "9", "--output_dir", "none")
    assert "worker 8 has no shard of" in capsys.readouterr().out
    assert Path("none/make_pairs.json").exists()
    with pytest.raises(ValueError, match="have 0 rows"):
        parquet_processing.describe_and_preview(
            parquet_processing.Config(train_data_dir="data", preview="")
        )


def pixels(cell):
    """A cell of an image as float32 (64, 64, 3), whatever its size."""
    with Image.open(io.BytesIO(cell["bytes"])) as image:
        return np.asarray(image.resize((64, 64))).astype(np.float32)


def lora_file():
    """A LoRA of the demo's UNet, as PEFT writes it."""
    weights = load_file(next(Path(MODEL, "unet").glob("*.safetensors")))
    name = next(x for x in weights if x.endswith("attn1.to_q.weight"))
    rows, columns = weights[name].shape
    name, rng = f"unet.{name.removesuffix('.weight')}", torch.Generator().manual_seed(0)
    down = torch.randn(4, columns, generator=rng)
    up = torch.randn(rows, 4, generator=rng)
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, "lora.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--lora lora.safetensors",
        "--accelerate deepcache:interval=2",
        "--guidance apg:norm=1",
        "--timesteps 999 499 --scheduler lcm --guidance_scale 0 1",
        "--width 32 --height 96",
        "--attention_sharing 0 0",
    ],
)
def test_flags_change_the_images(clip, monkeypatch, flags):
    on_devices(monkeypatch, 1)
    lora_file()
    run(clip, "--keep_all", output="plain", steps=10)
    run(clip, "--keep_all", *flags.split(), steps=10)
    plain, rows = rows_of("plain"), rows_of()
    assert [row["sample"] for row in rows] == [row["sample"] for row in plain] == [0, 1, 2] * 2
    for row, other in zip(rows, plain):
        with Image.open(io.BytesIO(row["edited_image"]["bytes"])) as image:
            assert image.size == ((32, 96) if "--width" in flags else (64, 64))
            assert np.ptp(np.asarray(image)) > 0
        assert row["edited_image"] != other["edited_image"]
        assert row["original_image"] != row["edited_image"]
        # Sharing changes the second image of a pair; the first one is of another program.
        change = np.abs(pixels(row["original_image"]) - pixels(other["original_image"])).mean()
        assert (change < 0.5) == ("--attention_sharing" in flags) or "--width" in flags
    if "--attention_sharing" in flags:
        assert {row["attention_sharing"] for row in rows} == {float(flags.split()[1])}


@pytest.mark.slow
def test_sdxl(clip):
    run(clip, "--keep_all", "--num_samples", "2", model=XL)
    rows = rows_of()
    assert len(rows) == 4
    with Image.open(io.BytesIO(rows[0]["edited_image"]["bytes"])) as image:
        assert np.ptp(np.asarray(image)) > 20


@pytest.mark.slow
def test_shards_train(clip, capsys, lenient_optimizer):
    """Also beside a shard without rows."""
    run(clip, "--lines_per_shard", "1", captions="captions.jsonl")
    table = pq.read_table(shards_of("data")[0])
    pq.write_table(table.slice(0, 0), shards_of("data")[0])
    parquet_processing.main(["--train_data_dir", "data", "--preview", ""])
    assert "unreadable  0 of" in capsys.readouterr().out
    create_modified_unet.main(["--pretrained_model_name_or_path", MODEL, "--output_dir", "unet"])
    flags = ["--pretrained_model_name_or_path", MODEL, "--unet_model_name_or_path", "unet"]
    flags += ["--train_data_dir", "data", "--output_dir", "model", "--resolution", "64"]
    flags += ["--train_batch_size", "4", "--max_train_steps", "2"]
    flax_train_instruct_pix2pix.main(flags)
    losses = [json.loads(x)["loss"] for x in Path("model/metrics.jsonl").read_text().splitlines()]
    assert losses and np.isfinite(losses).all() and Path("model/model_index.json").is_file()
    flags = ["--pretrained_model_name_or_path", MODEL, "--train_data_dir", "data"]
    cache_latents.main([*flags, "--output_dir", "latents", "--resolution", "64"])


# ------------------------------------------------------------------ mistakes

LONG = " ".join(["photo"] * 200)
MISTAKES = [
    ("--captions none.jsonl", "--captions none.jsonl cannot be read: No such file"),
    ("--captions long.jsonl", "has 1 problem: line 1: input is too long, 202 tokens of 77: 'photo"),
    ("--template a b c", "give one of --captions FILE and --template INPUT EDIT OUTPUT"),
    ("--clip_model WORDLESS", "opened: it has no tokenizer.json and no vocab.json; name a"),
    ("--model EDITS", "--model EDITS is an edit model (StableDiffusionInstructPix2PixPipeline)"),
    ("--guidance_scale 1 7", "up to 1 there is no guidance; take both above 1, or both up to 1"),
    ("--attention_sharing 0.1 1.1", "--attention_sharing 1.1 must be from 0 to 1"),
    ("--keep_all --early_stop", "--keep_all makes and keeps all samples; leave --early_stop or"),
    ("--worker 0", "--worker K and --num_workers N go together; give both"),
    (f'--negative_prompt "{LONG}"', "--negative_prompt has 1 problem: line 1: input is too long"),
    ("--negative_prompt red --guidance_scale 0 1", "--negative_prompt has no effect without"),
    ("--width 30", "size 64x30 (height x width) is not divisible by"),
    ("--accelerate tome", "--accelerate tome merges other positions in each image of a pair"),
    ("--output_dir .", "--output_dir . is not empty"),
]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Directories of models that make no pairs."""
    folder = tmp_path_factory.mktemp("others")
    make_tiny_pipeline(folder / "EDITS", in_channels=8)
    make_tiny_clip(folder / "WORDLESS")
    for file in [*(folder / "WORDLESS").glob("*token*"), folder / "WORDLESS" / "vocab.json"]:
        file.unlink(missing_ok=True)
    return folder


@pytest.mark.variants
@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_weights_are_read(
    clip, others, monkeypatch, capsys, flags, message
):
    def read(*args, **options):
        raise AssertionError("weights are read")

    monkeypatch.setattr(FlaxModelMixin, "from_pretrained", read)
    monkeypatch.setattr(FlaxCLIPModel, "from_pretrained", read)
    for name in ("EDITS", "WORDLESS"):
        shutil.copytree(others / name, name)
    write("long.jsonl", [ROWS[0] | {"input": LONG}])
    before = files_of(Path())
    assert message in refused(capsys, *flags_of(clip, *shlex.split(flags)))
    assert files_of(Path()) == before and not Path("data").exists()


@pytest.mark.slow
def test_other_flags_for_a_directory_with_pairs_are_refused(clip, capsys):
    """Flags that do not change pairs may differ."""
    run(clip)
    before = files_of(Path("data"))
    said = refused(capsys, *flags_of(clip, "--num_samples", "4"))
    assert "has pairs of a run with other flags: num_samples was 3 and is 4; name another" in said
    said = refused(capsys, *flags_of(clip, captions="captions.jsonl"))
    assert "has pairs of a run with other flags: checksum of the lines was" in said
    assert files_of(Path("data")) == before
    capsys.readouterr()
    run(clip, "--batch_size", "3", "--worker", "0", "--num_workers", "1")
    assert shards("data") == {str(x): y for x, y in before.items() if x.suffix == ".parquet"}


@pytest.mark.slow
def test_other_lists_give_the_same_pairs(clip, monkeypatch):
    """A template, and a .csv file, whose lines begin with 2."""
    on_devices(monkeypatch, 1)
    run(clip, output="list")
    lines = ["input,edit,output", *(",".join(row.values()) for row in ROWS[:2])]
    Path("two.csv").write_text("\n".join(lines))
    run(clip, captions="two.csv", output="table")
    assert [row["line"] for row in rows_of("table")] == [2] * 3 + [3] * 3
    images = [[row["edited_image"] for row in rows_of(x)] for x in ("table", "list")]
    assert images[0] == images[1]
    words = ["a photo of {x}", "turn day into night", "a photo of {x} at night"]
    words = ["--template", *words, "--fill", "x=the moon,a flower"]
    make_pairs.main([*flags_of(clip)[2:], *words])
    assert shards("data") == shards("list")
    listed = read_captions(Path("data/captions.jsonl"))
    assert [caption[1:] for caption in listed] == [tuple(row.values()) for row in ROWS[:2]]


@pytest.mark.slow
def test_without_clip_all_samples_are_kept(capsys):
    run("", "--preview")
    printed = capsys.readouterr()
    assert "6 pairs of 2 lines are kept, without scores" in printed.out
    assert "next: python parquet_processing.py --train_data_dir data" in printed.out
    rows = rows_of()
    assert len(rows) == 6 and all(np.isnan(row[name]) for row in rows for name in SCORES)
    assert all(row["original_image"]["bytes"] != row["edited_image"]["bytes"] for row in rows)
    with pytest.raises(SystemExit):
        run("", "--early_stop", output="other")
    assert '--clip_model "" makes and keeps all samples' in capsys.readouterr().err
