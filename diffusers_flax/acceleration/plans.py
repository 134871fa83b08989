"""Accelerations of sampling: their names and parameters, and what each step computes.

    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(
        "MODEL", accelerate=["deepcache:interval=3", "guidance:stop=0.6"]
    )
    plain = dataclasses.replace(pipeline, accelerate=None)

An acceleration is written NAME or NAME:PARAMETER=VALUE,PARAMETER=VALUE. The classes below have the
names, parameters and defaults; docs/acceleration.md says what each is worth. `plan_steps` decides
before anything is traced which branches of guidance a step computes, and how.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args, get_origin

import numpy as np

from diffusers_flax.command_line import Above, AtLeast, AtMost, Between, ranges_of

Fraction = Annotated[float, Between(0, 1)]
PARSERS = {bool: {"true": True, "false": False}.__getitem__}  # of types that do not parse text
FEW_STEPS = 8  # caches need more: with few steps neighbours differ too much


class Technique:
    """Base of the accelerations, frozen dataclasses with their parameters.

    A subclass has `name` and `slot`, the field of Acceleration; its parameters have their ranges
    beside their types.
    """

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            for limit in ranges_of(field.type):
                require(limit.contains(value), self, field.name, f"must be {limit.description}")
            if get_origin(field.type) is Literal:
                known = get_args(field.type)
                text = f"must be one of {', '.join(map(str, known))}"
                require(value in known, self, field.name, text)


@dataclass(frozen=True)
class Guidance(Technique):
    """Guidance in some steps; the others compute one branch.

    Args:
        start, stop: fractions of the steps, from 0 to 1.
        image_stop: for edits, fraction at which guidance by the original image ends, if that is
            before `stop`: two branches instead of three.
        sigma_min, sigma_max: the noise levels with guidance, sigma_min < sigma <= sigma_max, where
            sigma is the ratio of standard deviations, noise / scaled image.

    Source: arXiv 2404.07724 (interval of sigma; SDXL 0.28 to 5.42), arXiv 2506.08351 (early steps).
    """

    name: ClassVar[str] = "guidance"
    slot: ClassVar[str] = "guidance"
    start: Fraction = 0.0
    stop: Fraction = 1.0
    image_stop: Fraction = 1.0
    sigma_min: float = 0.0
    sigma_max: float = np.inf

    def __post_init__(self):
        super().__post_init__()
        require(self.start < self.stop, self, "stop", "must be above start")

    def branches_of(self, i, num_steps, sigma, branches):
        """The branches of step i."""
        fraction = i / num_steps
        inside = self.sigma_min < sigma <= self.sigma_max
        if "text" not in branches or len(branches) == 1:
            return branches
        if not (inside and self.start <= fraction < self.stop):
            return ("text",)
        if fraction >= self.image_stop and "image" in branches:
            return ("text", "image")
        return branches


class Cache(Technique):
    """Base of the caches; a run has at most one. caches.functions_of has their functions.

    A subclass has the method kinds(num_steps, starts), which returns Step.kind of each step; the
    steps `starts` are the first with their branches.
    """

    slot: ClassVar[str] = "cache"


@dataclass(frozen=True)
class DeepCache(Cache):
    """The whole UNet in every interval-th step; in others its last layer alone, on cached input.

    Args:
        interval: 2 or more: one step in `interval` is a whole one.
        warmup: whole steps at the beginning.

    Source: DeepCache (arXiv 2312.00858), section 3.2.
    """

    name: ClassVar[str] = "deepcache"
    interval: Annotated[int, AtLeast(2)] = 3
    warmup: Annotated[int, AtLeast(1)] = 1

    def kinds(self, num_steps, starts):
        """ "full" or "shallow" of each step; the steps `starts` have no valid cache."""
        full = set(starts) | set(range(min(self.warmup, num_steps)))
        for start, stop in pairwise([*starts, num_steps]):
            full |= set(range(start, stop, self.interval))
        return ["full" if i in full else "shallow" for i in range(num_steps)]


@dataclass(frozen=True)
class Spectrum(Cache):
    """Whole steps become rarer; between them the clean latents are forecast from earlier steps.

    Args:
        warmup: whole steps at the beginning.
        window, growth: a whole step follows floor(window) - 1 forecasts; window grows by `growth`
            after each.
        stop: fraction of the steps after which all are whole.
        degree, ridge, history: Chebyshev polynomials up to `degree` are fitted to the latest
            `history` whole steps, with ridge regression.
        weight: of the fit in the forecast; the rest is linear extrapolation.

    Source: Spectrum (arXiv 2603.01623).
    """

    name: ClassVar[str] = "spectrum"
    warmup: Annotated[int, AtLeast(2)] = 4
    window: Annotated[float, AtLeast(1)] = 2.0
    growth: Annotated[float, AtLeast(0)] = 0.5
    stop: Fraction = 0.9
    degree: Annotated[int, AtLeast(0)] = 3
    ridge: Annotated[float, Above(0)] = 1.0
    history: Annotated[int, AtLeast(2)] = 6
    weight: Fraction = 0.4

    def kinds(self, num_steps, starts):
        """ "full" or "forecast" of each step.

        The cache is of guided x_0, so it remains valid when the branches change.
        """
        kinds, window, forecasts = [], self.window, 0
        for i in range(num_steps):
            if i < self.warmup or i >= self.stop * num_steps:
                kinds.append("full")
            elif forecasts + 1 < int(window):
                kinds.append("forecast")
                forecasts += 1
            else:
                kinds.append("full")
                window, forecasts = window + self.growth, 0
        return kinds

    def coefficients(self, kinds):
        """Weights of the latest whole steps in each forecast, float32 (steps, history).

        Row i multiplies the history before step i, the newest last; whole steps have zeros.
        """
        table, past = np.zeros((len(kinds), self.history), np.float32), []
        for i, kind in enumerate(kinds):
            if kind == "full":
                past = [*past, i][-self.history :]
                continue
            steps = 2 * np.array([*past, i]) / 50 - 1  # as in the paper's runs of 50 steps
            basis = np.polynomial.chebyshev.chebvander(steps, self.degree)
            basis, now = basis[:-1], basis[-1]
            gram = basis.T @ basis + self.ridge * np.eye(self.degree + 1)
            row = self.weight * basis @ np.linalg.solve(gram, now)
            row[-2:] += (1 - self.weight) * np.array([-0.5, 1.5])  # linear, half a step ahead
            table[i, self.history - len(past) :] = row
        return table


@dataclass(frozen=True)
class TGate(Cache):
    """Text to image: after the gate, cross-attention is reused and guidance is off.

    Before the gate, self-attention is computed in every interval-th step and reused in between.
    After it, the text acts through the reused attention only; SDXL gets the null text's pooled
    states.

    Args:
        gate: number of steps before the gate.
        interval: of self-attention before the gate.
        warmup: steps before self-attention is reused.

    Source: T-GATE (arXiv 2404.02747), section 4.
    """

    name: ClassVar[str] = "tgate"
    gate: Annotated[int, AtLeast(2)] = 10
    interval: Annotated[int, AtLeast(1)] = 5
    warmup: Annotated[int, AtLeast(0)] = 2

    def kinds(self, num_steps, starts):
        """ "full", "store", "reuse_self" (self-attention), "gate" and "gated" (cross-attention)."""
        kinds = []
        for i in range(num_steps):
            if i >= self.gate:
                kinds.append("gated")
            elif i == self.gate - 1:
                kinds.append("gate")
            elif i < self.warmup:
                kinds.append("full")
            else:
                is_stored = i == self.warmup or i % self.interval == 0
                kinds.append("store" if is_stored else "reuse_self")
        return kinds


@dataclass(frozen=True)
class FirstBlockCache(Cache):
    """If the UNet's first layer changes little, what the other layers add is reused.

    Args:
        threshold: a step reuses the cache if the first layer's residual has changed by at most this
            since the latest whole step: mean absolute change / mean absolute value, per image.

    The program skips work only if all images of the device's batch are below the threshold.

    Source: first-block cache of ParaAttention, a form of TeaCache (arXiv 2411.19108).
    """

    name: ClassVar[str] = "fbcache"
    threshold: Annotated[float, Above(0)] = 0.08

    def kinds(self, num_steps, starts):
        """ "full" where there is no valid cache, else "adaptive"."""
        return ["full" if i in starts else "adaptive" for i in range(num_steps)]


@dataclass(frozen=True)
class TokenMerging(Technique):
    """Self-attention over fewer positions: similar ones are averaged before and copied after.

    Args:
        ratio: fraction of the positions that is merged away, at most 0.75.
        max_downsample: layers at 1/1, ..., 1/max_downsample of the latents' size merge. SDXL has
            attention from 1/2 on.
        random: True: the position that others of its 2x2 window may join is drawn per layer;
            False: the upper left one.

    Source: ToMe (arXiv 2303.17604), section 4.
    """

    name: ClassVar[str] = "tome"
    slot: ClassVar[str] = "tome"
    ratio: Annotated[float, Above(0), AtMost(0.75)] = 0.5
    max_downsample: Literal[1, 2, 4, 8] = 1
    random: bool = True


@dataclass(frozen=True)
class Int8(Technique):
    """The UNet's convolutions and linear layers in int8; see models.quantization.quantize.

    Args:
        mode: "fast": int8 matmuls in the layers where they are faster; "dynamic": in all layers;
            "weight": only the weights are stored in int8.
    """

    name: ClassVar[str] = "int8"
    slot: ClassVar[str] = "int8"
    mode: Literal["fast", "dynamic", "weight"] = "fast"


@dataclass(frozen=True)
class TinyDecoder(Technique):
    """Images are decoded by TAESD (AutoencoderTiny), an eighteenth of the VAE's work.

    Args:
        path: directory or hub id; "": madebyollin/taesd, for SDXL madebyollin/taesdxl.
    """

    name: ClassVar[str] = "taesd"
    slot: ClassVar[str] = "tiny_decoder"
    path: str = ""


CACHES = DeepCache, Spectrum, TGate, FirstBlockCache
TECHNIQUES = {x.name: x for x in (Guidance, *CACHES, TokenMerging, Int8, TinyDecoder)}


@dataclass(frozen=True)
class Acceleration:
    """Accelerations of a pipeline; None: not used. Made by parse."""

    guidance: Guidance | None = None
    cache: Cache | None = None
    tome: TokenMerging | None = None
    int8: Int8 | None = None
    tiny_decoder: TinyDecoder | None = None

    def __post_init__(self):
        if isinstance(self.cache, TGate) and (self.guidance or self.tome):
            raise ValueError("accelerate=tgate excludes guidance and tome")

    def __bool__(self):
        return self != Acceleration()

    def __str__(self):
        return " ".join(describe(x) for x in vars(self).values() if x is not None)


class Step(NamedTuple):
    """What a step computes: `branches` of guidance, and `kind`, a key of caches.functions_of.

    The kind "full" is needed where the branches change, unless the cache outlives its branches.
    """

    branches: tuple
    kind: str


def require(is_valid, technique, name, constraint):
    """Raise a ValueError that names a technique's parameter, unless it is valid."""
    if not is_valid:
        value = getattr(technique, name)
        raise ValueError(f"accelerate={technique.name}:{name}={value} {constraint}")


def describe(technique):
    """NAME:PARAMETER=VALUE,... with the parameters that are not the defaults."""
    defaults = vars(type(technique)())
    changed = [f"{name}={x}" for name, x in vars(technique).items() if x != defaults[name]]
    return f"{technique.name}:{','.join(changed)}" if changed else technique.name


def parse(specs):
    """Read accelerations.

    Args:
        specs: "NAME:PARAMETER=VALUE,...", several separated by spaces or in a sequence; objects of
            the classes above; an Acceleration; None or empty for none.

    Returns:
        Acceleration.

    Raises:
        ValueError: a name or parameter is unknown, a value is not valid, or two do not go together.
    """
    if isinstance(specs, Acceleration):
        return specs
    if isinstance(specs, str):
        specs = specs.split()
    elif not isinstance(specs, list | tuple):
        specs = [specs] if specs else []
    chosen = {}
    for spec in specs:
        technique = parse_one(spec) if isinstance(spec, str) else spec
        if first := chosen.get(technique.slot):
            raise ValueError(
                f"accelerate={first.name} and {technique.name} do not go together; take one of them"
            )
        chosen[technique.slot] = technique
    return Acceleration(**chosen)


def parse_one(spec):
    """ "NAME:PARAMETER=VALUE,..." -> an object of TECHNIQUES."""
    name, _, settings = spec.partition(":")
    if name not in TECHNIQUES:
        raise ValueError(
            f"accelerate={spec}: {name!r} is unknown; known: {', '.join(TECHNIQUES)}; several "
            "are separated by spaces, without quotation marks"
        )
    parsers = {field.name: type(field.default) for field in fields(TECHNIQUES[name])}
    parsers = {key: PARSERS.get(kind, kind) for key, kind in parsers.items()}
    values = {}
    for setting in filter(None, settings.split(",")):
        key, _, text = setting.partition("=")
        try:
            values[key] = parsers[key](text)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"accelerate={spec}: {setting!r} is no parameter of {name} with a value; it has "
                f"{', '.join(parsers)}"
            ) from error
    return TECHNIQUES[name](**values)


def plan_steps(acceleration, branches, scales):
    """Decide what each step of a run computes.

    Args:
        acceleration: Acceleration, or None for none.
        branches: of guidance in a plain run, "text" the one that remains without guidance.
        scales: alpha and sigma of each step, as from noise_scales. A timestep that PNDM repeats is
            a step.

    Returns:
        List of Step.

    Raises:
        ValueError: the accelerations do not fit these branches or this number of steps.
    """
    acceleration = acceleration or Acceleration()
    cache, num_steps = acceleration.cache, len(scales[0])
    chosen = [branches] * num_steps
    if acceleration.guidance:
        with np.errstate(divide="ignore"):
            sigmas = scales[1] / scales[0]
        chosen = [
            acceleration.guidance.branches_of(i, num_steps, sigma, branches)
            for i, sigma in enumerate(sigmas)
        ]
    if cache is None:
        return [Step(active, "full") for active in chosen]
    if num_steps <= FEW_STEPS:
        raise ValueError(f"accelerate={cache.name} needs more than {FEW_STEPS} steps")
    if isinstance(cache, TGate):
        gated = ("null",) if "null" in branches else branches
        chosen = [branches if i < cache.gate else gated for i in range(num_steps)]
    starts = [i for i in range(num_steps) if i == 0 or chosen[i] != chosen[i - 1]]
    kinds = cache.kinds(num_steps, starts)
    return list(map(Step, chosen, kinds))


def check_fits(acceleration, unet, layout):
    """Raise a ValueError for accelerations that a UNet or a Layout excludes."""
    cache, tome = acceleration.cache, acceleration.tome
    whole = tome or (cache if isinstance(cache, FirstBlockCache) else None)  # need all rows
    if whole and layout is not None and layout.rows > 1:
        raise ValueError(
            f"accelerate={whole.name} needs all rows of an image on one device, "
            f"not rows={layout.rows}"
        )
    if not tome:
        return
    levels = [2**i for i, kind in enumerate(unet.down_block_types) if "CrossAttn" in kind]
    if levels and levels[0] > tome.max_downsample:
        raise ValueError(f"accelerate=tome needs max_downsample={levels[0]} or more for this UNet")
