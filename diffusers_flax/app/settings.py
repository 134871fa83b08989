"""Settings of an image, and the recipe in its PNG file that carries them.

settings = Settings("make it red", guidance_scale=2, seed=7, resolution=64)
save_image(image, path, SOFTWARE, texts=page_recipe(settings, flags, {"input": file}))
settings = read_settings(path, plain, edits=True)  # of an uploaded file, or None
"""

import secrets
from dataclasses import asdict, dataclass, fields, replace

from diffusers_flax.acceleration.plans import parse
from diffusers_flax.command_line import check_seed
from diffusers_flax.generating.recipes import read_recipe, recipe_text
from diffusers_flax.pipelines.image_to_image import ImageToImage
from diffusers_flax.schedulers.factory import check_scheduler

SOFTWARE = "edit_app.py"  # marks the images of the page
SHAPES = {  # width : height of images from text
    "square": (1, 1),
    "landscape 4:3": (4, 3),
    "landscape 16:9": (16, 9),
    "portrait 3:4": (3, 4),
    "portrait 9:16": (9, 16),
}
PAGE = "page"  # entry of a recipe with the page's Settings
SCALES = ("guidance_scale", "image_guidance_scale")
RANGES = {  # of the page's sliders
    "guidance_scale": (0, 20),
    "image_guidance_scale": (0, 5),
    "num_inference_steps": (1, 150),
    "lora_weight": (0, 2),
    "mask_feather": (0, 64),
    "strength": (0, 1),
}
MAX_TEXT = 1000  # characters; 77 tokens are about 300


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

    def summary(self, edits):
        """The settings in a few words; edits: whether the model edits images."""
        words = [f"{'instruction' if edits else 'prompt'} scale {self.guidance_scale:g}"]
        words += [f"image scale {self.image_guidance_scale:g}"] * edits
        words += [] if self.strength is None else [f"strength {self.strength:g}"]
        words += [f"{self.num_inference_steps} steps", f"seed {self.seed}"]
        words += [*filter(None, [self.scheduler]), *self.accelerate]
        words += [f"{name} at {self.lora_weight:g}" for name in self.lora]
        return ", ".join(words)


NOTHING = Settings("")


@dataclass(frozen=True)
class Limits:
    """The page's choices."""

    smallest: int  # pixels, longer side
    largest: int
    loras: tuple[str, ...]  # names
    takes_strength: bool = False  # whether images are made from text and an image


def check_settings(settings, limits):
    """Raise a ValueError for settings out of range. Editor.check has the model's own checks."""
    if not settings.instruction.strip():
        raise ValueError("--instruction is empty; write a few words")
    for name in ("instruction", "negative_prompt"):
        try:
            getattr(settings, name).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"--{name} is not valid Unicode: character {error.start + 1} is an unpaired "
                "surrogate, such as half of an emoji; type it again"
            ) from None
        if len(getattr(settings, name)) > MAX_TEXT:
            raise ValueError(
                f"--{name} has {len(getattr(settings, name))} characters; write {MAX_TEXT} or less"
            )
    if settings.strength is not None and not limits.takes_strength:
        raise ValueError("--strength is for models that make images from text, not for edits")
    ranges = RANGES | {"resolution": (limits.smallest, limits.largest)}
    for name, (low, high) in ranges.items():
        if name == "strength" and settings.strength is None:
            continue
        if not low <= (value := getattr(settings, name)) <= high:
            unit = " pixels" * (name in ("resolution", "mask_feather"))
            raise ValueError(f"--{name} {value} must be from {low} to {high}{unit}")
    _ = settings.num_steps  # raises an error
    check_seed("seed", settings.seed)
    check_scheduler(settings.scheduler)
    if settings.shape not in SHAPES:
        raise ValueError(f"--shape {settings.shape} is unknown; choose from {', '.join(SHAPES)}")
    if unknown := sorted({*settings.lora} - {*limits.loras}):
        raise ValueError(f"--lora {unknown[0]} is not among the files that this page offers")
    parse(settings.accelerate)  # raises errors
    for spec in settings.accelerate:  # users must not choose a path of the server or a hub id
        if spec.startswith("taesd:"):
            raise ValueError(f"--accelerate {spec}: the page has one TAESD; write taesd")


def as_unicode(text):
    """A text with unpaired surrogates escaped, which JSON for browsers cannot have."""
    return text.encode(errors="backslashreplace").decode()


def draw_seed():
    """A new seed."""
    return secrets.randbelow(2**32)


def page_recipe(settings, flags, files=()):
    """The recipe_text of an image: flags of the programs, and the page's settings.

    Args:
        settings: Settings.
        flags: {name: value}, as edit_cli.py or generate_cli.py take them.
        files: see recipe_text.
    """
    return recipe_text(SOFTWARE, {**flags, PAGE: asdict(settings)}, files)


def read_settings(path, plain=NOTHING, edits=True):
    """The Settings in a PNG file with a recipe, else None.

    Args:
        path: of the file.
        plain: Settings for missing entries and entries of another type.
        edits: whether the page edits images; recipes of images from text then count as none.
    """
    recipe, text = read_recipe(path) or {}, "edit" if edits else "prompt"
    if text not in recipe:
        return None
    page = recipe.get(PAGE)
    saved = page if isinstance(page, dict) else {**recipe, "lora": ()}
    return settings_of({**saved, "instruction": str(recipe[text])}, plain)


def settings_of(saved, plain):
    """Settings from a dict of JSON values; plain: see read_settings."""
    settings = replace(plain, instruction=saved["instruction"])
    changes = {}
    for field in fields(Settings)[1:]:
        value, default = saved.get(field.name), getattr(settings, field.name)
        if isinstance(value, list):
            value = tuple(value)
        is_float = isinstance(default, float) or field.name == "strength"
        is_number = is_float and type(value) in (int, float)
        is_text = field.name == "scheduler" and isinstance(value, str)
        if type(value) is type(default) or is_number or is_text:
            changes[field.name] = float(value) if is_number else value
    return replace(settings, **changes)


def within_limits(settings, limits):
    """Adapt untrusted settings, or another page's, to this page.

    Values that this page does not allow become the nearest value or the default.

    Returns:
        (Settings that pass check_settings, list of changed names).
    """
    largest_steps = RANGES["num_inference_steps"][1]
    allowed = replace(
        settings,
        instruction=as_unicode(settings.instruction)[:MAX_TEXT],
        negative_prompt=as_unicode(settings.negative_prompt)[:MAX_TEXT],
        num_inference_steps=min(max(settings.num_inference_steps, 1), largest_steps),
        resolution=min(max(settings.resolution, limits.smallest), limits.largest),
        lora=tuple(name for name in settings.lora if name in limits.loras),
    )
    plain = Settings("a word", resolution=allowed.resolution)
    for field in fields(Settings)[1:]:
        try:
            check_settings(replace(plain, **{field.name: getattr(allowed, field.name)}), limits)
        except ValueError:
            allowed = replace(allowed, **{field.name: field.default})
    names = [field.name for field in fields(Settings)]
    return allowed, [x for x in names if getattr(settings, x) != getattr(allowed, x)]
