"""The published signatures of the pipelines' calls and of _generate, each argument written once."""

import functools
import inspect
from types import SimpleNamespace

# The arguments with defaults of the pipelines' calls and of _generate, in the published order.
CALL = (
    *("num_inference_steps", "height", "width", "guidance_scale", "latents", "neg_prompt_ids"),
    *("return_dict", "jit", "output_type", "guidance_rescale", "timesteps", "eta"),
)
GENERATE = (
    *("num_inference_steps", "height", "width", "guidance_scale", "latents", "neg_prompt_ids"),
    *("return_latents", "guidance_rescale", "branches", "timesteps", "eta"),
)
# None unless named here.
DEFAULTS = {
    "num_inference_steps": 50,
    "strength": 0.8,
    "start_timestep": 10,
    "guidance_scale": 7.5,
    "image_guidance_scale": 1.5,
    "guidance_rescale": 0.0,
    "return_dict": True,
    "return_latents": False,
    "jit": False,
    "output_type": "np",
}
INPUTS = ("prompt_ids", "image", "mask", "masked_image", "params", "prng_seed")
# The arguments of a call that are arrays, or trees of them.
ARRAYS = (*INPUTS, "latents", "noise", "neg_prompt_ids")


def signature_of(names):
    """The signature of a method with these arguments; INPUTS have no default."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind)]
    for name in names:
        default = inspect.Parameter.empty if name in INPUTS else DEFAULTS.get(name)
        parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


def published_call(method, *names):
    """`method`, which takes keywords, with these arguments, by position or name."""
    signature = signature_of(names)

    @functools.wraps(method)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return method(**bound.arguments)

    call.__signature__ = signature
    return call


def with_options(*names):
    """Decorator of a method whose last argument, `given`, has these options as attributes.

    The method itself takes each option as an argument, by position or name.
    """

    def decorate(method):
        _, *inputs, _ = inspect.signature(method).parameters
        signature = signature_of((*inputs, *names))

        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = SimpleNamespace(**{name: bound.arguments[name] for name in names})
            return method(*(bound.arguments[name] for name in ("self", *inputs)), options)

        wrapper.__signature__ = signature
        return wrapper

    return decorate
