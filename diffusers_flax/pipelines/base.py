"""The base class of the pipelines: reads and writes a pipeline directory; what all calls share.

A pipeline is a frozen dataclass of modules, tokenizers and a scheduler. running.py runs its stages.
"""

import inspect
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from tqdm import tqdm

import diffusers_flax
from diffusers_flax.devices.layout import Layout
from diffusers_flax.devices.precision import warn_if_slow
from diffusers_flax.images import to_pil
from diffusers_flax.loading.configs import ConfigMixin, FromSingleFile, FrozenConfig
from diffusers_flax.loading.directories import (
    COMPONENT_FILES,
    COMPONENTS,
    INDEX_NAME,
    has_component,
    read_component_configs,
    read_index,
    writing_pipeline,
)
from diffusers_flax.loading.embeddings import Embeddings
from diffusers_flax.loading.files import write_json
from diffusers_flax.loading.hub import (
    fetch_named,
    locate,
    open_source,
    refuse_push_to_hub,
    take_hub_options,
)
from diffusers_flax.loading.lora import Loras
from diffusers_flax.loading.tokenizer import load_tokenizer, tokenize
from diffusers_flax.loading.unet_delta import UnetDelta
from diffusers_flax.messages import warn_once
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.controlnet import FlaxControlNetModel
from diffusers_flax.models.quantization import (
    check_foldable,
    check_storage,
    check_stored,
    quantize,
)
from diffusers_flax.models.tiny_vae import (
    TINY_VAES,
    FlaxAutoencoderTiny,
    choose_tiny_vae,
    open_tiny_vae,
)
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL, with_tile
from diffusers_flax.outputs import FlaxImagePipelineOutput as FlaxImagePipelineOutput
from diffusers_flax.parameters import warn_of_float16
from diffusers_flax.pipelines.guidance import read_guidance
from diffusers_flax.pipelines.running import (
    INPUTS,
    RESULT_ARGUMENTS,
    SCALES,
    Call,
    Options,
    generate,
)
from diffusers_flax.pipelines.sampling import AYS_SD, decode, make_schedule, timestep_options
from diffusers_flax.schedulers.factory import scheduler_from_config

DIFFUSERS_VERSION = "0.39.0"  # written to model_index.json: the last with the Flax classes
# Fields of a pipeline that its programs depend on, besides components.
RUN_SETTINGS = ("dtype", "accelerate", "layout", "storage", "vae_dtype")
SETTINGS = (*RUN_SETTINGS[1:], "preview", "saved_programs")  # fields that are arguments of open
MODULES = {
    "unet": FlaxUNet2DConditionModel,
    "vae": FlaxAutoencoderKL,
    "text_encoder": FlaxCLIPTextModel,
    "text_encoder_2": FlaxCLIPTextModelWithProjection,
    "controlnet": FlaxControlNetModel,
}
TEXT_ENCODERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}
OTHER_CLASSES = {  # PyTorch's, in model_index.json
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
}

# The class names that model_index.json may have, without "Flax".
PIPELINE_CLASSES = tuple(
    f"StableDiffusion{family}{task}Pipeline"
    for family in ("", "XL")
    for task in ("", "Img2Img", "Inpaint", "InstructPix2Pix", "ControlNet")
)


@dataclass(frozen=True, eq=False)  # compiled programs belong to the object, so it must not change
class FlaxDiffusionPipeline(ConfigMixin, FromSingleFile):
    """A pipeline. Subclasses have its components as fields; absent components are None.

    Subclasses define `torch_class_name`, the PyTorch class that opens the same directory, and the
    stages of a run, see running.py.
    """

    accelerate: Any = field(default=None, kw_only=True)  # Acceleration
    preview: Any = field(default=None, kw_only=True)  # Preview
    layout: Layout | None = field(default=None, kw_only=True)  # None: jit or pmap, see the call
    tiny_vae: FlaxAutoencoderTiny | None = field(default=None, kw_only=True)
    tiny_vae_source: str | None = field(default=None, kw_only=True)  # its directory or hub id
    storage: str | None = field(default=None, kw_only=True)  # of kernels: "float8", "int8"
    vae_dtype: DTypeLike | None = field(default=None, kw_only=True)  # None: see compute_vae
    # {component: path for its from_pretrained}, if its weights are not in the directory
    component_sources: dict = field(default_factory=dict, kw_only=True)
    embeddings: Embeddings = field(default_factory=Embeddings, kw_only=True)  # of load_params
    saved_programs: Any = field(default=None, kw_only=True)  # SavedPrograms
    _progress_bar_config: dict = field(default_factory=dict, kw_only=True, repr=False)

    config_name = INDEX_NAME
    tiny_vae_name = TINY_VAES[0]  # hub id of the decoder for previews and accelerate="taesd"
    torch_class_name = None
    unet_inputs = ((1, 0),)  # what a UNet may take: (latents, masks)
    safety_checker = None
    feature_extractor = None
    ays_timesteps = AYS_SD  # what timesteps="ays" stands for
    encodes_images = False  # whether a run has the stage encode_image
    branch_scales = ("guidance_scale",)  # arguments of guidance_branches
    order_of_generate = None  # a method with the order of _generate's arguments; None: __call__

    def __post_init__(self):
        object.__setattr__(self, "accelerate", read_acceleration(self.accelerate))
        if self.accelerate:
            from diffusers_flax.acceleration.plans import check_fits

            self.check_acceleration(self.accelerate)
            check_fits(self.accelerate, self.unet, self.layout)
        check_storage(self.storage, self.accelerate and self.accelerate.int8)
        decoder = self.accelerate and self.accelerate.tiny_decoder
        wanted = choose_tiny_vae(decoder, self.preview, self.tiny_vae_name)
        if wanted and (self.tiny_vae is None or self.tiny_vae_source not in (None, wanted)):
            raise ValueError(
                f"the TAESD {wanted} is not loaded; give from_pretrained accelerate= and preview="
            )

    @classmethod
    def check_acceleration(cls, acceleration):
        """Raise a ValueError for an Acceleration that is not for this kind of pipeline."""

    @classmethod
    def check(cls, path, revision=None, replaced=None, index=None, **hub_options):
        """Read a directory's configs without weights, and check that this class can open it.

        Args:
            path, revision: as for from_pretrained.
            replaced: {component: object} in place of the directory's; "unet" as in from_pretrained.
            index: content of model_index.json; None reads it.

        Returns:
            (content of model_index.json; {component: its config}).

        Raises:
            ValueError: the directory or components are missing, or it is another kind of pipeline.
        """
        index = read_index(path, revision, **hub_options) if index is None else index
        configs = {}
        for name, component in (replaced or {}).items():
            if component is None or name not in COMPONENT_FILES:
                continue
            if not isinstance(component, str | Path):
                configs[name] = {**component.config} if name in ("unet", "vae") else {}
            elif name in ("unet", "vae"):
                folder, file = locate(name, component)
                if file is None:  # a file of weights has the directory's config
                    configs[name] = MODULES[name].load_config(folder, **hub_options)
        names = cls.required_components(path, index)
        configs = read_component_configs(path, names, revision, configs, **hub_options)
        cls.check_configs(path, configs)
        return index, configs

    @classmethod
    def required_components(cls, path, index):
        """Names of the components that a directory must have, by its model_index.json's content.

        Raises a ValueError if the directory is of the other family.
        """
        found, name = str(index.get("_class_name")), cls.__name__
        if ("XL" in found) != ("XL" in name):
            family, other = "Stable Diffusion XL", name.replace("XL", "")
            if "XL" in found:
                family, other = "Stable Diffusion 1.x or 2.x", name.replace("ion", "ionXL", 1)
            raise ValueError(f"{path} is a {found}, not {family}; open it with {other}")
        return [f.name for f in fields(cls) if f.name in COMPONENT_FILES and f.name != "controlnet"]

    @classmethod
    def check_configs(cls, path, configs):
        """Raise a ValueError for a UNet or VAE that is not for this class.

        path: for errors; configs: {component: its config}.
        """
        in_channels = configs["unet"].get("in_channels", 4)
        latent_channels = configs["vae"].get("latent_channels", 4)
        expected = [n * latent_channels + masks for n, masks in cls.unet_inputs]
        if in_channels not in expected:
            needed = " or ".join(map(str, expected))
            raise ValueError(
                f"the UNet of {path} has in_channels={in_channels}, this pipeline needs "
                f"{needed}; edit with an InstructPix2Pix pipeline, inpaint with an Inpaint "
                "pipeline, or widen the UNet and train it"
            )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        revision=None,
        variant=None,
        dtype=None,
        scheduler=None,
        from_pt=False,
        split_head_dim=False,
        use_memory_efficient_attention=False,
        lora=(),
        accelerate=(),
        preview=None,
        embeddings=(),
        unet_delta=(),
        layout=None,
        vae_tile=None,
        storage=None,
        param_dtype=None,
        vae_dtype=None,
        **components,
    ):
        """Read a diffusers pipeline; FlaxDiffusionPipeline uses the class that the directory names.

        Args:
            pretrained_model_name_or_path: directory or hub id; only the files used are downloaded.
            revision: branch, tag or commit on the hub.
            variant: of the weights' file names, e.g. "fp16".
            dtype: compute dtype of the modules, None: float32.
            scheduler: scheduler object that replaces the directory's.
            from_pt: True looks for PyTorch's weight files only.
            split_head_dim, use_memory_efficient_attention: of the published signature; no effect.
            lora: LoRA files to fold into the weights, FILE or FILE:WEIGHT; see loading.lora.Loras.
            accelerate: NAME or NAME:PARAMETER=VALUE,... or several; see acceleration.plans.parse.
            preview: Preview, to show the images while they are made.
            embeddings: textual-inversion files, FILE or FILE:TOKEN, whose tokens prompts may have;
                see loading.embeddings.Embeddings.
            unet_delta: (DISTILLED, BASE) or (DISTILLED, "BASE:WEIGHT"), UNets whose difference is
                added to the UNet's weights; see loading.unet_delta.UnetDelta.
            layout: Layout of the devices that programs run on; its place_params moves params there.
                None: calls run where params are, with jit=True on all devices.
            vae_tile: side in pixels of the tiles in which the VAE computes larger images; see
                models.vae.with_tile. None or 0: whole images.
            storage: "float8" or "int8": the kernels of UNet, ControlNets and text encoders take
                half the memory of bfloat16; see models.quantization.store.
            param_dtype: dtype of the parameters, as for FlaxModelMixin.from_pretrained. None: as in
                the files.
            vae_dtype: compute dtype of the VAE. None: dtype, or float32 for VAEs with force_upcast
                if dtype is float16 or the model is SDXL. A half dtype takes less memory, see
                docs/sdxl.md; the published SDXL VAE overflows float16, not bfloat16.
            **components: objects in place of the directory's: unet, vae, text_encoder, ... Their
                parameters are not read: put them into params. unet may also be a str, the
                file, directory or hub id of a UNet, whose weights are read; controlnet likewise,
                or several, for the classes with ControlNets. safety_checker, a
                FlaxStableDiffusionSafetyChecker, with feature_extractor, its CLIPImageProcessor:
                the directory's own are not read, and without them images are not checked. And
                cache_dir, force_download, local_files_only, token of
                huggingface_hub.hf_hub_download.

        Returns:
            (pipeline, params); params {"unet", "vae", "text_encoder", ...} of JAX arrays on the
            host's CPU device, see FlaxModelMixin.from_pretrained; {"scheduler"}, the scheduler's
            state, float32 for any dtype; and {"safety_checker"} if it has parameters.

        Raises:
            ValueError: the directory is missing, another kind of pipeline, or a component cannot
                be read.
        """
        path, hub_options = pretrained_model_name_or_path, take_hub_options(components)
        index = read_index(path, revision, **hub_options)
        if cls is FlaxDiffusionPipeline:
            cls = class_of(index, path)
        if "safety_checker" not in components and has_component(index, "safety_checker"):
            warn_once(
                f"the safety checker of {path} is not read: images are not checked; give "
                "safety_checker= and feature_extractor=, or safety_checker=None"
            )
        dtype = jnp.float32 if dtype is None else dtype
        execution = dict(accelerate=accelerate, preview=preview, layout=layout, vae_tile=vae_tile)
        execution |= dict(storage=storage, vae_dtype=vae_dtype)
        options = dict(index=index, embeddings=embeddings) | execution | hub_options
        pipeline = cls.open(path, revision, dtype, scheduler, components, **options)
        absent = [name for name, x in components.items() if not isinstance(x, str | Path)]
        options = dict(lora=lora, unet_delta=unet_delta, param_dtype=param_dtype) | hub_options
        params = pipeline.load_params(path, revision, variant, from_pt, absent, **options)
        if param_dtype is None:
            warn_of_float16(params.get("unet", {}))
        pipeline.quantize_params(params)
        return pipeline, params

    @classmethod
    def open(
        cls,
        pretrained_model_name_or_path,
        revision=None,
        dtype=jnp.float32,
        scheduler=None,
        replaced=None,
        index=None,
        embeddings=(),
        **options,
    ):
        """Like from_pretrained, without weights, and fast.

        Args:
            replaced, index: as for check.
            **options: saved_programs, SavedPrograms instead of compiling; all others, and the
                arguments above, as for from_pretrained.
        """
        path, replaced = pretrained_model_name_or_path, dict(replaced or {})
        hub_options, vae_tile = take_hub_options(options), options.pop("vae_tile", None)
        settings = dict.fromkeys(SETTINGS) | options
        names = {f.name for f in fields(cls)} & COMPONENTS
        if unknown := sorted(replaced.keys() - names):
            raise ValueError(
                f"{cls.__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(names))}"
            )
        if isinstance(replaced.get("unet"), str | Path):
            configs = getattr(path, "configs", path)  # of a SingleFile
            replaced["unet"] = open_source("unet", replaced["unet"], "unet", configs, **hub_options)
        more, sources = cls._open_more_components(
            path, revision, dtype, replaced, index, **hub_options
        )
        replaced |= more
        components = dict(replaced)
        if scheduler is not None:
            components["scheduler"] = scheduler
        index, configs = cls.check(path, revision, components, index, **hub_options)
        if isinstance(components.get("unet"), str | Path):
            sources["unet"] = components.pop("unet")
        if scheduler is None:
            components["scheduler"], _ = scheduler_from_config(configs["scheduler"], path)
        for name in MODULES.keys() & configs.keys() - components.keys():
            check_stored(configs[name], settings["storage"], f"{path}, {name}")
            components[name] = MODULES[name].from_config(configs[name], dtype=dtype)
        if vae_tile:
            components["vae"] = with_tile(components["vae"], vae_tile)
        for name in TEXT_ENCODERS.keys() & configs.keys() - components.keys():
            text_encoder = components[TEXT_ENCODERS[name]]
            components[name] = load_tokenizer(path, text_encoder, revision, name, **hub_options)
        embeddings = Embeddings(embeddings, **hub_options)
        embeddings.add_tokens(components)
        # A refiner has no first text encoder.
        for f in fields(cls):
            if f.name in COMPONENT_FILES:
                components.setdefault(f.name, None)
        settings["accelerate"] = read_acceleration(settings["accelerate"])
        if settings["vae_dtype"] is not None:
            settings["vae_dtype"] = warn_if_slow(jnp.dtype(settings["vae_dtype"]))
        decoder = settings["accelerate"] and settings["accelerate"].tiny_decoder
        if source := choose_tiny_vae(decoder, settings["preview"], cls.tiny_vae_name):
            settings["tiny_vae"] = open_tiny_vae(source, dtype, **hub_options)
            settings["tiny_vae_source"] = source
        settings |= cls._settings(index) | {"dtype": dtype, "embeddings": embeddings}
        settings["component_sources"] = sources
        return cls(**components, **settings)

    @classmethod
    def _open_more_components(cls, path, revision, dtype, replaced, index, **hub_options):
        """Components that a class opens itself, and component_sources; arguments as for open."""
        return {}, {}

    def load_params(
        self,
        pretrained_model_name_or_path,
        revision=None,
        variant=None,
        from_pt=False,
        absent=(),
        lora=(),
        unet_delta=(),
        param_dtype=None,
        **hub_options,
    ):
        """The parameters, for a pipeline of `open`; absent: names of components without them."""
        reading = {"param_dtype": param_dtype, "from_pt": from_pt, **hub_options}
        loras = Loras(lora, **hub_options)
        delta = UnetDelta(unet_delta, self.unet.config, variant, **hub_options)

        def convert(component, name, x):
            folded = delta.fold(name, x) if component == "unet" else x
            folded = loras.fold(component, name, folded)
            if folded is not x:
                check_foldable(x, pretrained_model_name_or_path)
            return self.embeddings.extend(component, name, folded)

        params = {"scheduler": self.scheduler.create_state()}
        if self.safety_checker is not None and self.safety_checker._do_init:
            params["safety_checker"] = self.safety_checker.params
        for name, module in vars(self).items():
            source = self.component_sources.get(name)
            if name not in MODULES or module is None or (name in absent and not source):
                continue
            options = {"storage": self.storage} if name != "vae" else {}
            if name == "unet" and source:
                source = fetch_named("unet", source, **hub_options)
                options["config"] = module.config_fields()
            elif not source:
                options |= {"subfolder": name, "revision": revision, "variant": variant}
            if name in TEXT_ENCODERS.values():
                options |= {"_do_init": False, "vocab_size": module.module.vocab_size}
            options |= {"convert": partial(convert, name)} | reading
            source = source or pretrained_model_name_or_path
            _, params[name] = type(module).from_pretrained(source, **options)
        loras.require_folded()
        delta.require_folded()
        if self.tiny_vae is not None:
            _, params["tiny_vae"] = type(self.tiny_vae).from_pretrained(
                self.tiny_vae_source, **reading
            )
        return params

    def quantize_params(self, params):
        """Make the UNet's kernels int8, in place, if the acceleration says so."""
        if int8 := self.accelerate and self.accelerate.int8:
            params["unet"] = quantize(params["unet"], int8.mode)

    @property
    def components(self):
        """{name: component} of the pipeline, to construct another one from."""
        parameters = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in parameters if name in COMPONENTS}

    def progress_bar(self, iterable):
        """A progress bar over an iterable, with the options of set_progress_bar_config.

        Pipelines show none, as all steps are one compiled program.
        """
        return tqdm(iterable, **self._progress_bar_config)

    def set_progress_bar_config(self, **kwargs):
        """Options of tqdm for progress_bar, such as disable=True."""
        self._progress_bar_config.clear()
        self._progress_bar_config.update(kwargs)

    @classmethod
    def _settings(cls, index):
        """Fields other than components, from model_index.json."""
        return {}

    @property
    def config(self):
        """Content of model_index.json, read-only: {component: (library, class)} and settings."""
        index = {
            "_class_name": self.torch_class_name,
            "_diffusers_version": DIFFUSERS_VERSION,
            "feature_extractor": [None, None],
            "image_encoder": [None, None],
            "scheduler": ["diffusers", type(self.scheduler).__name__.removeprefix("Flax")],
            **self._index(),
        }
        for name, component in self.components.items():
            if component is None:
                index[name] = [None, None]
            elif name in MODULES:
                library = "transformers" if name.startswith("text_encoder") else "diffusers"
                index[name] = [library, component.torch_class_name]
            elif name in OTHER_CLASSES:
                index[name] = OTHER_CLASSES[name]
        return FrozenConfig(index)

    def _file_content(self):
        return self.config

    @classmethod
    def _read_config(cls, path, subfolder=None, revision=None, **hub_options):
        return read_index(path, revision, **hub_options)

    def save_pretrained(self, save_directory, params, push_to_hub=False, *, max_shard_size=None):
        """Write a pipeline directory that PyTorch's class opens.

        A model in the directory is replaced, other files are not changed; see writing_pipeline.

        Args:
            save_directory: directory, created if missing.
            params: as from from_pretrained, not replicated; "scheduler" may be missing, and
                "safety_checker" if the object has its parameters.
            push_to_hub: must be False; `hf upload` sends a directory to the hub.
            max_shard_size: largest file of weights, in bytes or as "5GB"; None: each
                component's own default, "10GB".

        Raises:
            ValueError: params lack a component or do not match it, or push_to_hub is True.
        """
        refuse_push_to_hub(push_to_hub)
        self._require_params(params)
        components = {name: x for name, x in self.components.items() if x is not None}
        shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        with writing_pipeline(save_directory) as folder:
            for name, component in components.items():
                if name in MODULES:
                    component.save_pretrained(folder / name, params=params[name], **shards)
                elif name == "safety_checker":
                    component.save_pretrained(folder / name, params=params.get(name), **shards)
                else:
                    component.save_pretrained(folder / name)
                if name in TEXT_ENCODERS:
                    # vocab.json and merges.txt, which is what transformers before 5.0 reads.
                    component.backend_tokenizer.model.save(str(folder / name))
            write_json(folder / INDEX_NAME, self.config)

    def _index(self):
        """Entries of model_index.json other than components."""
        return {
            "requires_safety_checker": self.safety_checker is not None,
            "safety_checker": [None, None],
        }

    def description(self):
        """All that a compiled program depends on in a pipeline, except the code, as a str."""
        lines, settings = [type(self).__name__], (*RUN_SETTINGS, "tiny_vae", *self._settings({}))
        for name, x in vars(self).items():
            if name in TEXT_ENCODERS and x is not None:
                x = tokenize(x, "", x.model_max_length).tolist()
            elif name == "scheduler":
                x = type(x).__name__, sorted(x.config.items())
            elif name in MODULES:
                x = getattr(x, "module", x)  # of a text encoder, whose config may change
            elif name not in settings:
                continue
            lines.append(f"{name} {x}")
        return "\n".join(lines)

    # ------------------------------------------------------------ calls

    def text_modules(self):
        """The modules of the text encoders, the only components whose config may change."""
        encoders = (getattr(self, name, None) for name in TEXT_ENCODERS.values())
        return tuple(encoder.module for encoder in encoders if encoder is not None)

    @property
    def text_encoders(self):
        """[(name, text encoder, its tokenizer)]; a refiner has no first one."""
        pairs = [(name, getattr(self, key, None)) for key, name in TEXT_ENCODERS.items()]
        return [(name, getattr(self, name), tokenizer) for name, tokenizer in pairs if tokenizer]

    def _require_params(self, params):
        """Raise a ValueError if parameters of a module are missing."""
        names = {name for name in (*MODULES, "tiny_vae") if getattr(self, name, None) is not None}
        if missing := sorted(names - params.keys()):
            raise ValueError(
                f"params lack {', '.join(missing)}; give the parameters of every component"
            )

    def prepare_text_inputs(self, prompt):
        """Tokenize prompts, for negative prompts and the like.

        Args:
            prompt: str or list of str; tokens past the text encoder's 77 are cut, with a warning.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        return tokenize(self.tokenizer, prompt, self.text_encoder.module.max_position_embeddings)

    numpy_to_pil = staticmethod(to_pil)

    @property
    def vae_scale_factor(self):
        """Pixels per latent, along a side: 8."""
        return 2 ** (len(self.vae.block_out_channels) - 1)

    def image_size(self, height=None, width=None, image_shape=None):
        """Height and width of the result, in pixels.

        Args:
            height, width: None: the size of the input image or, without one, the size that the
                model was trained at.
            image_shape: (..., 3, H, W) of the input image, or (..., 4, h, w) of its latents.

        Raises:
            ValueError: height or width is not a positive multiple of the VAE's factor.
        """
        factor = self.vae_scale_factor
        if image_shape is None:
            side = self.unet.sample_size
            defaults = [x * factor for x in (side if isinstance(side, tuple) else (side, side))]
        else:
            scale = factor if self.is_latents(image_shape) else 1
            defaults = [x * scale for x in image_shape[-2:]]
        sides = [y if x is None else x for x, y in zip((height, width), defaults)]
        size = f"size {sides[0]}x{sides[1]} (height x width)"
        if any(side < 1 or side % factor for side in sides):
            near = "x".join(str(max(factor, round(side / factor) * factor)) for side in sides)
            raise ValueError(f"{size} is not divisible by {factor}; try {near}")
        return tuple(map(int, sides))

    def check_parallel(self, branches, height=None):
        """Raise a ValueError for branches, or a height in pixels, that the layout cannot divide."""
        if self.layout is not None:
            from diffusers_flax.devices.parallelism import check_parallel

            height, _ = self.image_size(height)
            check_parallel(self.layout, self.unet, branches, height, self.vae_scale_factor)

    def is_latents(self, image_shape):
        """Whether an image's shape, (..., C, H, W), is of latents."""
        return image_shape[-3] == self.vae.latent_channels

    def latent_shape(self, batch_size, height=None, width=None):
        """(B, 4, height / 8, width / 8), see image_size."""
        height, width = self.image_size(height, width)
        factor = self.vae_scale_factor
        return batch_size, self.vae.latent_channels, height // factor, width // factor

    @property
    def compute_vae(self):
        """The VAE in vae_dtype; None: in its own, or float32 for float16 with force_upcast."""
        if self.vae_dtype is not None:
            return self.vae.clone(dtype=jnp.dtype(self.vae_dtype))
        overflows = self.vae.force_upcast and self.vae.dtype == jnp.float16
        return self.vae.clone(dtype=jnp.float32) if overflows else self.vae

    def make_schedule(self, options, shape):
        """The Schedule of a run with these Options; shape: of the latents."""
        names = ("timesteps", "eta", "first_step", "denoising_start", "denoising_end")
        steps = {name: getattr(options, name) for name in names}
        return make_schedule(self.scheduler, shape, options.num_inference_steps, **steps)

    def _generate(self, *arguments, **options):
        """The pipeline as one pure function of arrays, for one device; jit or pmap it.

        Args:
            arguments: as for __call__, in its order, of Stable Diffusion for SDXL's text to image.
            options: as for __call__; return_latents; and branches of guidance to compute, static,
                None: the ones that the scales need, all of them for traced scales.

        Returns:
            images, float32 (B, H, W, 3) in [0, 1], or with return_latents the scaled latents,
            float32 (B, 4, H / 8, W / 8).
        """
        call = type(self).order_of_generate or type(self).__call__
        bound = inspect.signature(call).bind(self, *arguments, **options)
        bound.apply_defaults()
        call = self.make_call(bound.arguments)
        inputs = call.inputs | call.scales | {"prng_seed": call.prng_seed}
        return generate(self, call.options, (), inputs, {}, call.params)

    def make_call(self, arguments):
        """The Call of the arguments of __call__ or _generate, {name: value}, `self` among them."""
        given = arguments.get("options", {}) | arguments
        given = {name: x for name, x in given.items() if name not in ("self", "options")}

        def take(names):
            return {name: given.pop(name) for name in names if name in given}

        result, scales = take(RESULT_ARGUMENTS), {"guidance_rescale": 0.0} | take(SCALES)
        strength, first_step = given.pop("strength", None), given.pop("start_timestep", 0)
        options = {"timesteps": None, "eta": None} | take(Options.__dataclass_fields__)
        inputs = dict.fromkeys(INPUTS) | take(INPUTS)
        if given:
            raise TypeError(f"{type(self).__name__} has no argument {', '.join(given)}")
        steps = (options[name] for name in ("num_inference_steps", "timesteps", "eta"))
        ays = () if self.scheduler.is_flow else self.ays_timesteps
        options |= timestep_options(*steps, ays)
        options["guidance"] = read_guidance(options.get("guidance"), self.accelerate)
        images = inputs["image"], inputs["masked_image"]
        shape = next((x.shape for x in images if x is not None), None)
        sides = self.image_size(options.get("height"), options.get("width"), shape)
        options |= dict(zip(("height", "width"), sides))
        if not options.get("branches"):
            options["branches"] = self.guidance_branches(*map(scales.get, self.branch_scales))
        if (output_type := result.get("output_type")) not in (None, "np", "pil", "latent"):
            raise ValueError(f"output_type={output_type!r} is unknown; take np, pil or latent")
        if output_type == "latent":
            options["return_latents"] = True
        if options.get("denoising_start") is None:  # else it chooses the first step
            if strength is not None:
                num_steps = options["num_inference_steps"]
                first_step = self.get_timestep_start(num_steps, strength)
            options["first_step"] = first_step
        return Call(Options(**options), inputs, scales, **result)

    def decode(self, params, inputs, options, encoded, latents):
        """Images, float32 (B, H, W, 3) in [0, 1], of scaled latents (B, 4, h, w): the last stage.

        params, inputs, options: see running.generate; encoded: result of the stage encode_image.
        """
        if self.accelerate and self.accelerate.tiny_decoder:
            return decode(self.tiny_vae, params["tiny_vae"], latents, self.layout)
        return decode(self.compute_vae, params["vae"], latents, self.layout)


def read_acceleration(accelerate):
    """The Acceleration for accelerate=, see plans.parse; None: no acceleration."""
    if not accelerate:
        return None
    from diffusers_flax.acceleration.plans import parse

    return parse(accelerate)


def pipeline_class(path, revision=None, **hub_options):
    """The pipeline class that a directory's model_index.json names."""
    return class_of(read_index(path, revision, **hub_options), path)


def class_of(index, path):
    """The pipeline class that a model_index.json's content names; path: of it, for errors."""
    name = str(index.get("_class_name")).removeprefix("Flax")
    if name not in PIPELINE_CLASSES:
        raise ValueError(
            f"{path} is a {name}, which is not supported; supported are "
            f"{', '.join(PIPELINE_CLASSES)}"
        )
    return getattr(diffusers_flax, f"Flax{name}")
