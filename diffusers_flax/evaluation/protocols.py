"""What papers measure of edits: which metrics, with which networks, and the mean over what.

Source: each protocol's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from diffusers_flax.evaluation.metrics import METRICS, PIXEL_METRICS

VIT_L_14 = "openai/clip-vit-large-patch14"
VIT_B_32 = "openai/clip-vit-base-patch32"
USUAL = (  # metrics of instruct_pix2pix
    *PIXEL_METRICS,
    *("image_similarity", "direction_similarity", "text_similarity", "truth_similarity"),
)
NAMES = {  # what a metric needs, for the report
    ("edited",): "truth",
    ("edited_caption",): "the caption of the truth",
    ("original_caption", "edited_caption"): "both captions",
}


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
    says: str = ""  # what is compared, for the report


PROTOCOLS = {
    "instruct_pix2pix": Protocol(
        metrics={name: METRICS[name].heading for name in USUAL},
        clip_model=VIT_L_14,
        is_benchmark=False,
        parts={"": ""},
    ),
    "magicbrush": Protocol(
        title="MagicBrush test",
        source="arXiv 2306.10012, section 4; evaluation/image_eval.py of OSU-NLP-Group/MagicBrush",
        says="The result against the true image: L1 and L2 of pixels in [0, 1], the result resized "
        "to the true image's size (bicubic); CLIP-I, CLIP's features; DINO, class tokens of images "
        "scaled to 256 and cropped to 224; CLIP-T, the result against the local description of the "
        "true image. "
        "All turns: every turn edits the true image of the turn before. Final turn: a session's "
        "turns edit one another's results, and the last is compared.",
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
        says="No true image. CLIP dir: the change of image against the change of captions; CLIP-I, "
        "DINO and L1: the result against the input; CLIP-T: the result against the output caption.",
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
        says="A judge's scores from 0 to 10 of the input and the result, both scaled to 512 x 512 "
        "pixels of area: G_SC, the least of two scores of the edit; G_PQ, the least of two scores "
        "of the result's look; G_O, the root of their product. Means of the means of the tasks.",
        metrics={"semantics": "G_SC", "quality": "G_PQ", "overall": "G_O"},
        parts={"": "full set", "_intersection": "intersection subset"},
        clip_model="",
        is_judged=True,
    ),
    "imgedit": Protocol(
        title="ImgEdit-Bench, basic suite",
        source="arXiv 2505.20275; github.com/PKU-YuanGroup/ImgEdit, Benchmark/Basic",
        says="The mean of a judge's three scores from 1 to 5 of the input and the result. Means of "
        "the means of the types of edits.",
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


def metrics_of(config):
    """{name: heading} of the metrics to compute, without those whose model is "".

    Args:
        config: ScoreFlags, with clip_model.
    """
    protocol = PROTOCOLS[config.protocol]
    if protocol.is_judged:
        return {}
    wanted = {name: METRICS[name].heading for name in config.metrics} | protocol.metrics
    models = {"clip": config.clip_model, "dino": config.dino_model}
    return {name: x for name, x in wanted.items() if models.get(METRICS[name].network, True)}


def left_out(pairs, config):
    """The metrics that pairs and flags do not allow, one sentence each.

    Args:
        pairs: list of HeldOutPair.
        config: ScoreFlags, with clip_model.

    Raises:
        ValueError: nothing can be measured.
    """
    protocol, used, sentences = PROTOCOLS[config.protocol], metrics_of(config), []
    if protocol.is_judged:
        return []
    unused = {name: x for name, x in protocol.metrics.items() if name not in used}
    for flag, network in (("clip_model", "clip"), ("dino_model", "dino")):
        if headings := [x for name, x in unused.items() if METRICS[name].network == network]:
            sentences.append(f'left out, as --{flag} is "": {", ".join(headings)}')
    possible = set(used)
    for needs, what in NAMES.items():
        missing = sum(any(not getattr(pair, name) for name in needs) for pair in pairs)
        affected = [name for name in used if METRICS[name].needs == needs]
        if missing and affected:
            which = "all" if missing == len(pairs) else f"{missing} of {len(pairs)}"
            headings = ", ".join(used[name] for name in affected)
            sentences.append(f"left out for {which} pairs, without {what}: {headings}")
            possible -= {*affected} if missing == len(pairs) else set()
    masks = sum(pair.mask is not None for pair in pairs)
    if not protocol.is_benchmark and 0 < masks < len(pairs):
        sentences.append(
            f"left out for {len(pairs) - masks} of {len(pairs)} pairs, without mask: the metrics "
            "inside and outside of the mask"
        )
    if not possible:
        raise ValueError(
            f"no metric is possible: {'; '.join(sentences)}; give truths or captions, or another "
            "--protocol"
        )
    return sentences
