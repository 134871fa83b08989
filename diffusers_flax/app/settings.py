"""Settings of an image, and the recipe in its PNG file that carries them.

settings = Settings("make it red", guidance_scale=2, seed=7, resolution=64)
texts = recipe_text(SOFTWARE, {**flags, PAGE: asdict(settings)}, {"input": file})
settings = settings_of(read_recipe(file), plain, limits)  # of an uploaded file
"""

from contextlib import suppress
from dataclasses import dataclass, fields, replace

from diffusers_flax.acceleration.plans import parse
from diffusers_flax.pipelines.image_to_image import ImageToImage
from diffusers_flax.schedulers.factory import check_scheduler

SOFTWARE = "edit_app.py"  # marks the images of the page
PAGE = "page"  # entry of a recipe with the page's Settings
SHAPES = {  # width : height of images from text
    "square": (1, 1),
    "landscape 4:3": (4, 3),
    "landscape 16:9": (16, 9),
    "portrait 3:4": (3, 4),
    "portrait 9:16": (9, 16),
}
SCALES = ("guidance_scale", "image_guidance_scale")
RANGES = {
    "guidance_scale": (0, 20),
    "image_guidance_scale": (0, 5),
    "num_inference_steps": (1, 150),
    "seed": (0, 2**32 - 1),
    "lora_weight": (0, 2),
    "mask_feather": (0, 64),  # pixels
    "strength": (0, 1),
}


@dataclass(frozen=True)
class Settings:
    """All that an image depends on but the model, the original image and the mask."""

    instruction: str  # for models that make images from text, the prompt
    guidance_scale: float = 7.5
    image_guidance_scale: float = 1.5
    num_inference_steps: int = 50
    seed: int = 0
    resolution: int = 512  # pixels, longer side
    shape: str = "square"  # of SHAPES, for images from text
    scheduler: str | None = None  # None: the model's own
    accelerate: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()  # names of files that the page offers
    lora_weight: float = 1.0  # factor of each file's own weight
    negative_prompt: str = ""
    mask_feather: int = 0  # pixels
    # fraction of the steps to run, of images from text and an image; None: edits, images from text
    strength: float | None = None

    @property
    def num_steps(self):
        """Number of denoising steps that run; raises a ValueError if strength leaves none."""
        if self.strength is None:
            return self.num_inference_steps
        skipped = ImageToImage.get_timestep_start(self.num_inference_steps, self.strength)
        return self.num_inference_steps - skipped


@dataclass(frozen=True)
class Limits:
    """The page's choices."""

    smallest: int  # pixels, longer side
    largest: int
    loras: tuple[str, ...]  # names
    takes_strength: bool = False  # whether images are made from text and an image


# A value of each setting's type.
EXAMPLES = Settings("", scheduler="", strength=1.0)


def converted(name, value):
    """A setting from a control or a recipe, in its type; raises a ValueError for other values."""
    example = getattr(EXAMPLES, name)
    if value is None and name in ("scheduler", "strength"):
        return None
    try:
        if isinstance(example, tuple):
            return tuple(map(str, [value] if isinstance(value, str) else value or ()))
        return str(value or "") if isinstance(example, str) else type(example)(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={value} is not of type {type(example).__name__}") from None


def check_settings(settings, limits):
    """Raise a ValueError for settings out of range. Editor.check has the model's own checks."""
    if not settings.instruction.strip():
        raise ValueError("instruction= is empty; write a few words")

    if settings.strength is not None and not limits.takes_strength:
        raise ValueError("strength= is for models that make images from text, not for edits")
    ranges = RANGES | {"resolution": (limits.smallest, limits.largest)}
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name}={value} must be from {low} to {high}")
    _ = settings.num_steps  # raises an error
    check_scheduler(settings.scheduler)
    if settings.shape not in SHAPES:
        raise ValueError(f"shape={settings.shape} is unknown; choose from {', '.join(SHAPES)}")
    if unknown := sorted({*settings.lora} - {*limits.loras}):
        raise ValueError(f"lora={unknown[0]} is not among the files that this page offers")
    parse(settings.accelerate)  # raises errors
    for spec in settings.accelerate:  # users must not choose a path of the server or a hub id
        if spec.startswith("taesd:"):
            raise ValueError(f"accelerate={spec}: the page has one TAESD; write taesd")


def settings_of(recipe, plain, limits):
    """The Settings of a recipe, of this page or of another program.

    Args:
        recipe: dict of JSON values, with "edit" or "prompt".
        plain: Settings in place of those that are missing or that this page cannot have.
        limits: Limits.
    """
    text = recipe["prompt" if limits.takes_strength else "edit"]
    # LoRA files of another program are not among this page's.
    saved = recipe.get(PAGE, {name: x for name, x in recipe.items() if name != "lora"})
    settings = replace(plain, instruction="a word")
    for name in (field.name for field in fields(Settings)[1:] if field.name in saved):
        with suppress(ValueError):
            changed = replace(settings, **{name: converted(name, saved[name])})
            check_settings(changed, limits)
            settings = changed
    return replace(settings, instruction=str(text))
