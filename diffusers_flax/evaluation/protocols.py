"""Scores of edits as papers report them: what is compared with what, and the mean over what.

PROTOCOLS has all that differs between them. A Scorer computes the metrics of results:

    scorer = Scorer(pairs, PROTOCOLS["magicbrush"].metrics, clip, Dino("facebook/dino-vits16"))
    values = scorer.measure([0, 1], [image, other_image])

Source: each protocol's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from PIL import Image

from diffusers_flax.evaluation.perceptual import Dino, Lpips, centred, require_ssim, ssim
from diffusers_flax.generating.clip import cosine

VIT_L_14 = "openai/clip-vit-large-patch14"
VIT_B_32 = "openai/clip-vit-base-patch32"
TRUTH, INPUT = "edited", "original"
# Of pixels: a result is first resized to the size of the image that it is compared with, bicubic.
PIXELS = {
    "l1": (TRUTH, lambda a, b: np.abs(a - b).mean()),
    "mse": (TRUTH, lambda a, b: np.square(a - b).mean()),
    "l1_to_input": (INPUT, lambda a, b: np.abs(a - b).mean()),
}
# Cosines of features of two images, or of an image and a caption. Each network scales and crops
# both images itself, from their own sizes.
CLIP = ("truth_similarity", "image_similarity", "text_similarity", "direction_similarity")
DINO = {"dino": TRUTH, "dino_to_input": INPUT}
EXTRA = {"dino": "DINO", "lpips": "LPIPS", "ssim": "SSIM"}  # of --metrics, and their headings


@dataclass(frozen=True)
class Protocol:
    """How a benchmark or paper scores edits.

    A metric of a part has the part's suffix: l1_final. Its value is the mean over the pairs of the
    part; of a judged protocol, the mean over the groups of edits of the means in each group.
    """

    title: str
    source: str
    says: str  # what is compared, for the report
    # {name: heading}, the paper's; the names mean what they mean in evaluation/metrics.py
    metrics: Mapping[str, str]
    clip_model: str
    parts: Mapping[str, str] = field(default_factory=lambda: {"": "all pairs"})  # {suffix: heading}
    is_judged: bool = False


PROTOCOLS = {
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
    """Names of a Scorer's metrics, without those whose model is "".

    Args:
        config: ScoreFlags, with clip_model.
    """
    protocol = PROTOCOLS.get(config.protocol)
    measured = protocol.metrics if protocol and not protocol.is_judged else ()
    names = dict.fromkeys([*measured, *config.metrics])
    unwanted = (*(() if config.dino_model else DINO), *(() if config.clip_model else CLIP))
    return tuple(name for name in names if name not in unwanted)


def load_networks(metrics, dino_model):
    """(Dino or None, Lpips or None), as the metrics need them."""
    if "ssim" in metrics:
        require_ssim()
    dino = Dino(dino_model) if set(metrics) & DINO.keys() else None
    return dino, Lpips() if "lpips" in metrics else None


def left_out_scores(pairs, protocol, config):
    """The metrics of a protocol that pairs and flags do not allow, one sentence each.

    Args:
        pairs: list of HeldOutPair.
        protocol: Protocol.
        config: ScoreFlags, with clip_model.

    Raises:
        ValueError: nothing can be measured.
    """
    if protocol.is_judged:
        if config.metrics or config.clip_model:
            raise ValueError(
                f"--protocol {config.protocol} has no true images; leave --metrics and "
                "--clip_model out"
            )
        return []
    used, sentences = metrics_of(config), []
    headings = {**EXTRA, **protocol.metrics}
    for flag, networks in (("--clip_model", CLIP), ("--dino_model", DINO)):
        unused = [
            x for name, x in protocol.metrics.items() if name in networks and name not in used
        ]
        if unused:
            sentences.append(f'left out, as {flag} is "": {", ".join(unused)}')
    need_truth = {"l1", "mse", "dino", "truth_similarity", "lpips", "ssim"}
    needs = {
        "truth": (need_truth, lambda x: x.edited),
        "the caption of the truth": ({"text_similarity"}, lambda x: x.edited_caption),
        "both captions": (
            {"direction_similarity"},
            lambda x: (x.original_caption and x.edited_caption) or None,
        ),
    }
    possible = set(used)
    for requirement, (names, get) in needs.items():
        missing = sum(get(pair) is None for pair in pairs)
        affected = [headings[name] for name in used if name in names]
        if missing and affected:
            which = f"{missing} of {len(pairs)}" if missing < len(pairs) else "all"
            sentences.append(
                f"left out for {which} pairs, without {requirement}: {', '.join(affected)}"
            )
            possible -= names if missing == len(pairs) else set()
    if not possible:
        raise ValueError(
            f"no metric of {protocol.title} is possible: {'; '.join(sentences)}; give truths or "
            "captions, or another --protocol"
        )
    return sorted(sentences)


class Scorer:
    """Metrics of results of held-out pairs.

    Args:
        pairs: list of HeldOutPair.
        metrics: names, of PIXELS, CLIP, DINO and EXTRA.
        clip, dino, lpips: Clip, Dino and Lpips, each None if no metric needs it.
        sizes: (width, height) of each pair's edit, to which images are fitted before they are
            compared; None: they are compared at their own sizes, as papers do.
    """

    def __init__(self, pairs, metrics, clip=None, dino=None, lpips=None, sizes=None):
        self._pairs, self._metrics, self._sizes = pairs, metrics, sizes
        self._clip, self._dino, self._lpips = clip, dino, lpips
        self._parts = sorted({part for pair in pairs for part in pair.parts})
        self._features = {}  # {(network, what, place): features}
        self._images = {}  # {(what, place): image}, of one call

    def measure(self, places, images):
        """Metrics of results.

        Args:
            places: index of each result's pair, int.
            images: results, PIL images.

        Returns:
            {metric and part's suffix: list of floats}, NaN where it is not defined or where the
            pair is not of the part.
        """
        found, self._images = {}, {}
        if any(name in CLIP for name in self._metrics):
            found |= self._clip_values(places, images)
        for name, what in DINO.items():
            if name in self._metrics:
                results = self._encode("dino", images)
                found[name] = cosine(results, self._images_features("dino", what, places)).tolist()
        names = [name for name in self._metrics if name in (*PIXELS, "lpips", "ssim")]
        for name in names:
            found[name] = [self._pixel_value(name, *x) for x in zip(places, images)]
        return {
            f"{name}{part}": [
                value if part in self._pairs[place].parts else np.nan
                for place, value in zip(places, found[name])
            ]
            for part in self._parts
            for name in self._metrics
        }

    def _image(self, what, place):
        """A pair's image, PIL, or None: what is TRUTH or INPUT."""
        if (what, place) not in self._images:
            pair = self._pairs[place]
            size = None if self._sizes is None else self._sizes[place]
            fitted = pair.fitted_edited if what == TRUTH else pair.fitted_original
            self._images[what, place] = fitted(size)
        return self._images[what, place]

    def _pixel_value(self, name, place, result):
        what, compare = PIXELS.get(name, (TRUTH, None))
        other = self._image(what, place)
        if other is None:
            return np.nan
        if result.size != other.size:
            result = result.resize(other.size, Image.Resampling.BICUBIC)
        if compare is None:
            return ssim(result, other) if name == "ssim" else self._lpips.distance(result, other)
        return float(compare(*(np.asarray(x, np.float32) / 255 for x in (result, other))))

    def _clip_values(self, places, images):
        result = self._encode("clip", images)
        truth, original = (self._images_features("clip", x, places) for x in (TRUTH, INPUT))
        after, before = (self._text_features(x, places) for x in (TRUTH, INPUT))
        return {
            "truth_similarity": cosine(result, truth).tolist(),
            "image_similarity": cosine(result, original).tolist(),
            "text_similarity": cosine(result, after).tolist(),
            "direction_similarity": cosine(result - original, after - before).tolist(),
        }

    def _encode(self, network, images):
        """Features (n, D) of PIL images, as the preprocessing of OpenAI's CLIP crops them."""
        if network == "dino":
            return self._dino.image_features(images)
        side = self._clip.side
        return self._clip.image_features([centred(image, side, side) for image in images])

    def _images_features(self, network, what, places):
        """Features (n, D) of the pairs' images, NaN where there is none; computed once."""

        def encode(missing):
            images = {place: self._image(what, place) for place in missing}
            images = {place: x for place, x in images.items() if x is not None}
            return zip(images, self._encode(network, list(images.values())))

        dim = self._clip.dim if network == "clip" else self._dino.dim
        return self._remembered((network, what), places, encode, dim)

    def _text_features(self, what, places):
        """Features (n, D) of the captions of the pairs' images, likewise."""

        def encode(missing):
            texts = {place: getattr(self._pairs[place], f"{what}_caption") for place in missing}
            texts = {place: x for place, x in texts.items() if x is not None}
            return zip(texts, self._clip.text_features(list(texts.values())))

        return self._remembered(("text", what), places, encode, self._clip.dim)

    def _remembered(self, kind, places, encode, dim):
        missing = [place for place in places if (*kind, place) not in self._features]
        self._features |= {(*kind, place): np.full(dim, np.nan) for place in missing}
        self._features |= {(*kind, place): row for place, row in encode(missing)}
        return np.stack([self._features[*kind, place] for place in places])
