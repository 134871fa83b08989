"""FlaxPreTrainedModel: a Linen module, its config and its parameters in one object.

transformers' Flax classes had this form: they are called like a function, with their own
parameters or the argument `params`.

    text_encoder = FlaxCLIPTextModel.from_pretrained("MODEL", subfolder="text_encoder")
    states = text_encoder(input_ids)[0]
    states = text_encoder(input_ids, params=other_params, train=True)[0]

    text_encoder, params = FlaxCLIPTextModel.from_pretrained("MODEL", _do_init=False)
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from diffusers_flax.loading.hub import fetch_directory, refuse_push_to_hub, take_hub_options
from diffusers_flax.parameters import FloatingCasts

# Config entries that choose a call's outputs, in the order of its arguments; their defaults.
CALL_SETTINGS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}


class FromTransformers:
    """A class attribute that imports a transformers config, and torch with it, when read."""

    def __init__(self, name):
        self.name = name

    def __get__(self, instance, owner):
        import transformers

        return getattr(transformers, self.name)


class FlaxPreTrainedModel(FloatingCasts):
    """Base class of the CLIP models.

    A subclass has `config_class`, a transformers config; `module_class`, a Linen module that is a
    FlaxModelMixin; and `__call__`.

    Args:
        config: a config_class; changing it changes the model. Or a config.json's content; `config`
            then makes the object when first read.
        input_shape: stored as an attribute; no parameter depends on it.
        seed: of the random parameters.
        dtype: compute dtype of the module.
        _do_init: True makes random float32 parameters; False none, and calls need params=.
    """

    config_class = None
    module_class = None
    main_input_name = "input_ids"
    base_model_prefix = ""
    framework = "flax"
    generation_config = None
    _missing_keys = frozenset()  # from_pretrained refuses incomplete weights

    def __init__(self, config, input_shape=(1, 1), seed=0, dtype=jnp.float32, _do_init=True):
        if isinstance(config, Mapping):
            self._content = dict(config)
        else:
            self.config = config
        self.input_shape = input_shape
        self.seed = seed
        self.dtype = dtype
        self._do_init = _do_init
        self._params = _init_weights(self.module, self.key) if _do_init else None

    # ---------------------------------------------------------------- config and parameters

    @functools.cached_property
    def config(self):
        """The config; changing it changes the model. Reading it imports torch."""
        return self.config_class.from_dict(self._content)

    @property
    def module(self):
        """The Linen module of the current config; equal configs have equal modules."""
        is_read = "config" in vars(self)
        content = self._entries(self.config) if is_read else self._content
        return self.module_class.from_config(content, dtype=self.dtype)

    @classmethod
    def _entries(cls, config):
        """A config's entries that the module has, as in a config.json."""
        content = config.to_dict()
        return {name: content[name] for name in cls.module_class.entry_names() & content.keys()}

    def _call_settings(self, *values):
        """The CALL_SETTINGS with these values; the config's in place of None."""
        if "config" in vars(self):
            defaults = {name: getattr(self.config, name) for name in CALL_SETTINGS}
        else:
            defaults = CALL_SETTINGS | self._content
        settings = zip(CALL_SETTINGS, values, strict=True)
        return {name: defaults[name] if value is None else value for name, value in settings}

    @functools.cached_property
    def key(self):
        """PRNG key of the random parameters; made when read, as this starts JAX."""
        return jax.random.PRNGKey(self.seed)

    @property
    def torch_class_name(self):
        """The PyTorch class that opens the same directory."""
        return self.module_class.torch_class_name

    @property
    def params(self):
        """The parameters, a nested dict of arrays; assigned arrays may have other shapes.

        Raises:
            ValueError: _do_init was False.
        """
        if self._params is None:
            raise ValueError(
                f"this {type(self).__name__} was made with _do_init=False and has no parameters; "
                "pass them as params="
            )
        return self._params

    @params.setter
    def params(self, params):
        self._params = unfreeze(params) if isinstance(params, FrozenDict) else params

    @property
    def params_shape_tree(self):
        """The parameters' shapes and dtypes, a nested dict of jax.ShapeDtypeStruct."""
        return jax.eval_shape(lambda: self.module.init_weights(jax.random.PRNGKey(0)))

    @property
    def required_params(self):
        """The paths of all parameters, a set of tuples of names."""
        return set(flatten_dict(self.params_shape_tree))

    def init_weights(self, rng, input_shape=None, params=None):
        """Random float32 parameters.

        Args:
            rng: PRNG key.
            input_shape: no effect, as no parameter depends on it.
            params: tree to complete with random parameters.

        Returns:
            Nested dict of arrays.
        """
        random = self.module.init_weights(rng)
        if params is None:
            return random
        return unflatten_dict(flatten_dict(random) | flatten_dict(unfreeze(params)))

    def _variables(self, params):
        """What Linen's apply takes: the parameters, or the model's own for None or {}."""
        return {"params": params or self.params}

    @classmethod
    def can_generate(cls):
        """False: these models generate no text."""
        return False

    # ---------------------------------------------------------------- files

    @classmethod
    def from_config(cls, config, dtype=jnp.float32, **overrides):
        """Build the model, without parameters, from the content of a config.json.

        Args:
            config: mapping; missing entries have the module's defaults.
            dtype: compute dtype of the module.
            **overrides: entries that win over `config`.

        Returns:
            The model, as with _do_init=False.

        Raises:
            ValueError: an entry is not implemented or has the wrong type.
        """
        model = cls({**config, **overrides}, dtype=dtype, _do_init=False)
        cls.module_class.from_config(config, **overrides)
        return model

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        dtype=jnp.float32,
        *,
        config=None,
        subfolder="",
        revision=None,
        ignore_mismatched_sizes=False,
        trust_remote_code=None,
        _do_init=True,
        **kwargs,
    ):
        """Read config.json and the weights in the same directory.

        Args:
            pretrained_model_name_or_path: a directory, or a hub id ("owner/name").
            dtype: compute dtype of the module.
            config: config_class that replaces config.json, or its directory or hub id.
            subfolder: the model's directory in a pipeline, e.g. "text_encoder".
            revision: branch, tag or commit on the hub.
            ignore_mismatched_sizes: without effect: weights that do not fit are refused.
            trust_remote_code: without effect, as no code is downloaded.
            _do_init: False returns the parameters apart from the model.
            **kwargs: param_dtype, variant, from_pt and the hub's keywords as in
                FlaxModelMixin.from_pretrained, and config entries that override config.json, e.g.
                output_hidden_states=True.

        Returns:
            The model, with `params` on the default device; with _do_init=False (model, params),
            params on the host's CPU device.

        Raises:
            ValueError: as FlaxModelMixin.from_pretrained.
        """
        path, place = pretrained_model_name_or_path, dict(subfolder=subfolder, revision=revision)
        names = {*CALL_SETTINGS, *cls.module_class.entry_names()}
        overrides = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        if isinstance(config, str | Path):
            if not Path(config).is_file():
                hub_options = take_hub_options(dict(kwargs))
                config = fetch_directory(config, ["config.json"], **hub_options)
            config = cls.config_class.from_pretrained(config)
        if config is None:
            _, params = cls.module_class.from_pretrained(
                path, dtype, **place, **kwargs, **overrides
            )
            content = cls.module_class.load_config(path, **place, **take_hub_options(kwargs))
            config = {**cls.module_class.own_config(content), **overrides}
        else:
            if overrides:
                config = cls.config_class.from_dict(config.to_dict() | overrides)
            kwargs["config"] = cls._entries(config)
            _, params = cls.module_class.from_pretrained(path, dtype, **place, **kwargs)
        model = cls(config, dtype=dtype, _do_init=False)
        if not _do_init:
            return model, params
        model._do_init = True
        model._params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)
        return model

    def save_pretrained(
        self,
        save_directory,
        params=None,
        push_to_hub=False,
        max_shard_size="10GB",
        token=None,
        safe_serialization=True,
        **kwargs,
    ):
        """Write config.json and safetensors that PyTorch's from_pretrained opens.

        Args:
            save_directory: directory, made if absent.
            params: nested dict of arrays, not replicated; None for the model's own.
            push_to_hub: must be False.
            max_shard_size: largest safetensors file, in bytes or as "10GB".
            token, safe_serialization: without effect: nothing is uploaded, files are safetensors.
            **kwargs: variant, dtype and flax_msgpack of FlaxModelMixin.save_pretrained.

        Raises:
            ValueError: params are not this model's, or push_to_hub is True.
        """
        refuse_push_to_hub(push_to_hub)
        self.module.save_pretrained(
            save_directory, params or self.params, max_shard_size=max_shard_size, **kwargs
        )


@functools.partial(jax.jit, static_argnums=0)  # equal modules share the compiled program
def _init_weights(module, rng):
    return module.init_weights(rng)
