"""A run as one program per part, each on the device of its part.

    stages = programs_of_parts(generate, (pipeline, compiled_in), arrays)
    images = stages(arrays, shared, device_of={"text": d0, "unet": d1, "vae": d2}.get)

A stage replays the run: the results of the parts before are its inputs, the run ends with the
result of its own part, and nothing else of the trace is computed. So a run needs no other form to
be taken apart. Stages are dispatched without waiting: the text of the next call may be encoded
while the UNet's device works.
"""

import functools
import logging

import jax

from diffusers_flax.devices.parts import part_of_models, run_parts

logger = logging.getLogger(__name__)


class _NextPart(Exception):
    """Ends the trace of a stage where the next part begins; models: the names of its models."""

    def __init__(self, models):
        super().__init__(models)
        self.models = models


class Stages:
    """The programs of a run; see programs_of_parts.

    Attributes:
        models: for each part of the run, in order, the names of its models, as far as they are
            known from traces.
        num_traces: how many programs were traced.
    """

    def __init__(self, function, static):
        self.function, self.static = function, static
        self.models, self.num_traces = [], 0
        self._run_stage = jax.jit(self._stage, static_argnums=0)

    def _stage(self, number, arrays, shared, results):
        """The result of a part, or the run's result if no part follows.

        Args:
            number: of the part, from 0; -1: none, this only finds the first one.
            arrays, shared: of the function; params has the part's models only.
            results: of the parts before.
        """
        if number >= 0:
            self.num_traces += 1
            logger.info("compiling the program of %s", part_of_models(self.models[number]))
        results = list(results)
        parts = iter(range(number + 2))

        def run_part(models, call, params):
            part = next(parts)
            if part > number:
                raise _NextPart(models)
            if part == number:
                results.append(call(params))
            return results[part]

        with run_parts(run_part):
            try:
                return self.function(*self.static, arrays, shared)
            except _NextPart as found:
                if len(self.models) == number + 1:
                    self.models.append(found.models)
        return results[-1] if results else None

    def __call__(self, arrays, shared, device_of, one_at_a_time=False):
        """Run the stages.

        Args:
            arrays, shared: of the function. Parameters are moved to their part's device, unless
                they are there.
            device_of: part -> device; parts are text, unet, vae.
            one_at_a_time: True waits for each stage, so that the parameters of one part at a time
                are on a device.

        Returns:
            The function's result, on the device of the last part.
        """
        params = arrays["params"]
        if not self.models:
            jax.eval_shape(functools.partial(self._stage, -1), arrays, shared, ())
        results, number = (), 0
        while number < len(self.models):
            models = self.models[number]
            device = device_of(part_of_models(models))
            own = {name: params[name] for name in models if name in params}
            own = _move(own, device)
            inputs = {name: x for name, x in arrays.items() if name != "params"}
            # A program takes NumPy arrays only if it uses them.
            inputs, *others = _move((inputs, shared, results), device, jax.Array)
            result = self._run_stage(number, inputs | {"params": own}, *others)
            if one_at_a_time:
                jax.block_until_ready(result)
            results, number = (*results, result), number + 1
        return result


@functools.lru_cache(maxsize=64)
def _stages(function, static, structure):
    return Stages(function, static)


def programs_of_parts(function, static, arrays):
    """The Stages of a run; the same ones for the same run.

    Args:
        function: (*static, arrays, shared) -> result, a module-level function that calls methods
            with the decorator `part`; arrays["params"] are parameters by model.
        static: its first arguments, hashable.
        arrays: of a call; which of them are None may change what the parts are.
    """
    inputs = {name: x for name, x in arrays.items() if name != "params"}
    return _stages(function, static, jax.tree.structure(inputs))


def _move(tree, device, kind=object):
    """A tree with its arrays of a kind moved to a device; arrays already on it are not copied."""
    leaves, structure = jax.tree.flatten(tree)
    absent = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, kind) and not (isinstance(x, jax.Array) and x.devices() == {device})
    ]
    for i, x in zip(absent, jax.device_put([leaves[i] for i in absent], device)):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)
