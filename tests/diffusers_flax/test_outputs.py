import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from diffusers_flax.outputs import ModelOutput


@struct.dataclass
class Output(ModelOutput):
    sample: jax.Array
    extra: tuple | None = None
    state: jax.Array | None = None


SAMPLE, STATE = jnp.arange(3.0), jnp.float32(7)
OUTPUT = Output(SAMPLE, state=STATE)


def test_fields_by_attribute_name_and_index():
    assert isinstance(OUTPUT, dict) and list(OUTPUT) == ["sample", "state"] and len(OUTPUT) == 2
    assert OUTPUT.extra is None and "extra" not in OUTPUT and OUTPUT.get("extra", 5) == 5
    for value in (OUTPUT.sample, OUTPUT["sample"], OUTPUT[0], OUTPUT[:1][0], OUTPUT.to_tuple()[0]):
        assert value is SAMPLE
    assert OUTPUT[-1] is OUTPUT[1] is STATE
    assert [name for name, _ in OUTPUT.items()] == list(OUTPUT.keys())
    with pytest.raises(KeyError):
        OUTPUT["extra"]
    with pytest.raises(IndexError):
        OUTPUT[2]


def test_pytree():
    paths = [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(OUTPUT)]
    assert paths == [".sample", ".state"]
    doubled = jax.tree.map(lambda x: 2 * x, OUTPUT)
    assert type(doubled) is Output and list(doubled) == ["sample", "state"] and doubled[1] == 14

    def scale(output, factor):
        return output.replace(sample=factor * output["sample"])

    for result in (
        jax.jit(scale)(OUTPUT, 3.0),
        jax.vmap(scale, in_axes=(None, 0))(OUTPUT, jnp.array([3.0])),
        jax.pmap(scale, in_axes=(None, 0))(OUTPUT, jnp.array([3.0])),
    ):
        assert type(result) is Output
        np.testing.assert_array_equal(result[0].reshape(3), 3 * SAMPLE)
    grads = jax.grad(lambda output: (output[0] ** 2).sum() + output.state)(OUTPUT)
    np.testing.assert_array_equal(grads["sample"], 2 * SAMPLE)
    assert grads.state == 1
