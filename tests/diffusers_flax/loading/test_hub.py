"""Models by hub id: from a stand-in for the hub, and from the cache when no hub answers."""

import hashlib
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_server import LocalServer, send
from original_layout import original_layout, write_single_file
from tiny_models import make_tiny_pipeline, make_tiny_xl, write_tokenizer
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from diffusers_flax.generating.clip import Clip
from diffusers_flax.loading import hub
from diffusers_flax.models.clip import FlaxCLIPTextModel
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)

COMMIT = "c" * 40
ANSWER_LIMIT = 1  # seconds that the client waits for the hub


class ModelHub(LocalServer):
    """A hub of models: the files of `folder`/OWNER/NAME, and the paths asked for."""

    def __init__(self, folder):
        self.folder, self.requests = folder, []
        super().__init__()

    def answer(self, request):
        self.requests.append(request.path)
        path = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(?:main|c{40})/(.+)", request.path)
        file = path and self.folder / path[1] / path[2]
        if not (file and file.is_file()):
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            return send(request, 404, headers=headers)
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        send(request, 200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})


@pytest.fixture
def use_hub(monkeypatch, tmp_path):
    """A function that makes a port of this machine the hub, with an empty cache in tmp_path."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", ANSWER_LIMIT)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "")

    def use(port):
        endpoint = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        hub.hub_answers.cache_clear()

    return use


def put_in_cache(folder, name):
    """A repository in the hub client's cache; returns the directory of its files."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(folder, repository / "snapshots" / COMMIT))


def make_clip(folder):
    """Write a tiny CLIP model of transformers, with its processor."""
    vocab = write_tokenizer(folder)
    tower = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text = tower | {"vocab_size": len(vocab)}
    vision = tower | {"image_size": 32, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    CLIPImageProcessor(crop_size=32, size=32).save_pretrained(folder)
    return folder


def test_a_cached_model_opens_without_the_hub(use_hub, tmp_path):
    """Both tokenizers, CLIP for evaluation; what is not cached is an error, all without waiting."""
    with socket.socket() as silent:  # it takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        use_hub(silent.getsockname()[1])
        put_in_cache(make_tiny_xl(tmp_path / "xl", edits=True), "someone/xl")
        put_in_cache(tmp_path / "xl" / "text_encoder", "someone/text")
        put_in_cache(make_clip(tmp_path / "clip"), "someone/clip")
        start = time.monotonic()
        pipeline, params = FlaxDiffusionPipeline.from_pretrained("someone/xl", variant="fp16")
        assert pipeline.prepare_text_inputs("make it red").shape == (1, 2, 77)
        assert {"unet", "vae", "text_encoder", "text_encoder_2"} <= params.keys()
        assert Clip("someone/clip").text_features(["red", "make it"]).shape[0] == 2
        config = FlaxCLIPTextModel.from_pretrained(
            "someone/xl", subfolder="text_encoder", config="someone/text"
        ).config
        assert config.hidden_size == 16
        with pytest.raises(ValueError, match=r"no config\.json in madebyollin/taesdxl"):
            type(pipeline).open("someone/xl", accelerate="taesd")
        with pytest.raises(ValueError, match=r"--clip_model someone/other cannot be opened"):
            Clip("someone/other")
        # One question is not answered; opening itself takes a second or two.
        assert time.monotonic() - start < ANSWER_LIMIT + 8


def test_what_a_model_needs_is_downloaded(use_hub, tmp_path):
    """A later process asks the same hub again; one with the cache alone makes no request."""
    folder = make_tiny_pipeline(tmp_path / "hub" / "someone" / "tiny")
    make_clip(tmp_path / "hub" / "someone" / "clip")
    with ModelHub(tmp_path / "hub") as server:
        use_hub(server.port)
        pipeline, _ = FlaxDiffusionPipeline.from_pretrained("someone/tiny")
        expected = FlaxStableDiffusionInstructPix2PixPipeline.open(folder)
        ids = pipeline.prepare_text_inputs("make it red")
        assert (ids == expected.prepare_text_inputs("make it red")).all()
        assert Clip("someone/clip").dim == 512
        count = len(server.requests)
        FlaxDiffusionPipeline.from_pretrained("someone/tiny", local_files_only=True)
        assert len(server.requests) == count


@pytest.mark.slow
def test_a_single_file_of_the_hub(use_hub, tmp_path):
    """By its place or its published address; configs of the family's model, then of the cache."""
    default = tmp_path / "hub" / "stable-diffusion-v1-5" / "stable-diffusion-v1-5"
    folder = make_tiny_pipeline(default, in_channels=4)
    (tmp_path / "hub" / "someone" / "tiny" / "sub").mkdir(parents=True)
    file = tmp_path / "hub" / "someone" / "tiny" / "sub" / "model.safetensors"
    write_single_file(file, original_layout(folder))
    names = [
        "someone/tiny/sub/model.safetensors",
        "https://huggingface.co/someone/tiny/blob/main/sub/model.safetensors",
    ]
    with ModelHub(tmp_path / "hub") as server:
        use_hub(server.port)
        for name in names:
            pipeline, _ = FlaxDiffusionPipeline.from_single_file(name)
            assert type(pipeline).__name__ == "FlaxStableDiffusionPipeline"
        assert not any("unet/diffusion_pytorch_model" in path for path in server.requests)
        count = len(server.requests)
        FlaxDiffusionPipeline.from_single_file(names[1], local_files_only=True)
        assert len(server.requests) == count
        with pytest.raises(ValueError, match=r"there is no other\.ckpt in someone/tiny"):
            FlaxDiffusionPipeline.from_single_file("someone/tiny/other.ckpt")
