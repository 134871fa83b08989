"""What papers measure of edits: which metrics, with which networks, and the mean over what.

Source: each protocol's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from diffusers_flax.evaluation.metrics import METRICS, PIXEL_METRICS

VIT_L_14 = "openai/clip-vit-large-patch14"
VIT_B_32 = "openai/clip-vit-base-patch32"
SIMILARITIES = (
    *("image_similarity", "direction_similarity", "text_similarity", "truth_similarity"),
)


@dataclass(frozen=True)
class Protocol:
    """How a paper scores edits.

    A metric of a part has the part's suffix: l1_final. Its value is the mean over the pairs of the
    part; of a judged protocol, the mean over the groups of edits of the means in each group.
    """

    metrics: Mapping[str, str]  # {name in METRICS, or of a judge: heading}
    clip_model: str
    is_benchmark: bool = True  # has a set of its own; results are compared at the set's sizes
    is_judged: bool = False
    parts: Mapping[str, str] = field(default_factory=lambda: {"": "all pairs"})  # {suffix: heading}
    title: str = ""
    source: str = ""


PROTOCOLS = {
    "instruct_pix2pix": Protocol(
        metrics={name: METRICS[name].heading for name in (*PIXEL_METRICS, *SIMILARITIES)},
        clip_model=VIT_L_14,
        is_benchmark=False,
    ),
    "magicbrush": Protocol(
        title="MagicBrush test",
        source="arXiv 2306.10012, section 4; evaluation/image_eval.py of OSU-NLP-Group/MagicBrush",
        metrics={
            "l1": "L1",
            "mse": "L2",
            "truth_similarity": "CLIP-I",
            "dino": "DINO",
            "text_similarity": "CLIP-T",
        },
        parts={"": "all turns (single-turn)", "_final": "final turn (multi-turn)"},
        clip_model=VIT_B_32,
    ),
    "emu_edit": Protocol(
        title="Emu Edit test",
        source="arXiv 2311.10089; card of facebook/emu_edit_test_set",
        metrics={
            "direction_similarity": "CLIP dir",
            "image_similarity": "CLIP-I",
            "text_similarity": "CLIP-T",
            "dino_to_input": "DINO",
            "l1_to_input": "L1",
        },
        clip_model=VIT_B_32,
    ),
    "gedit": Protocol(
        title="GEdit-Bench",
        source="arXiv 2504.17761; github.com/stepfun-ai/Step1X-Edit",
        metrics={"semantics": "G_SC", "quality": "G_PQ", "overall": "G_O"},
        parts={"": "full set", "_intersection": "intersection subset"},
        clip_model="",
        is_judged=True,
    ),
    "imgedit": Protocol(
        title="ImgEdit-Bench, basic suite",
        source="arXiv 2505.20275; github.com/PKU-YuanGroup/ImgEdit, Benchmark/Basic",
        metrics={"overall": "overall"},
        clip_model="",
        is_judged=True,
    ),
}


@dataclass(frozen=True)
class ScoreFlags:
    """Which scores: of a paper's protocol, and more metrics."""

    # instruct_pix2pix: curves of CLIP similarities; others: docs/evaluation.md
    protocol: Literal["instruct_pix2pix", "magicbrush", "emu_edit", "gedit", "imgedit"] = (
        "instruct_pix2pix"
    )
    instruction_language: Literal["en", "cn"] = "en"  # of --protocol gedit
    # more metrics, of results and truths; lpips needs requirements-metrics.txt
    metrics: tuple[Literal["dino", "lpips", "ssim"], ...] = ()
    # DINO ViT/16 for the protocols and --metrics dino: directory or hub id; "": no DINO
    dino_model: str = "facebook/dino-vits16"
