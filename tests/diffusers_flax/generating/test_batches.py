"""Batches that run while others are prepared and written."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from diffusers_flax.generating.batches import FileWriter, run_ahead


@pytest.mark.parametrize("in_flight", [1, 2])
def test_batches_in_flight(in_flight):
    """Results come in order; with two in flight the second does not wait for the first."""
    prepared, dispatched = [], []

    def numbers():
        for number in range(5):
            prepared.append(number)
            yield number

    def dispatch(number):
        dispatched.append(number)
        return jnp.full(2, 2 * number)

    results = run_ahead(
        numbers(), dispatch, lambda number, array: np.asarray(array).tolist(), in_flight
    )
    for expected, (number, result, seconds) in enumerate(results):
        assert number == expected and result == [2 * number] * 2 and seconds >= 0
        assert dispatched == list(range(min(5, number + in_flight)))
        assert len(prepared) <= len(dispatched) + 1
    assert dispatched == prepared == list(range(5))


@pytest.mark.parametrize("place", ["prepare", "dispatch", "collect", "write", "caller"])
def test_an_error_anywhere_ends_the_run(place):
    """Files of results before are complete, and no thread is left."""
    written, threads = [], threading.active_count()

    def fail_at(here, number):
        if here == place and number == 3:
            raise KeyboardInterrupt if place == "caller" else ValueError(f"{number} is broken")
        return number

    def write(number):
        written.append(fail_at("write", number))

    def dispatch(number):
        return jnp.full(2, fail_at("dispatch", number))

    with pytest.raises((ValueError, KeyboardInterrupt)) as error, FileWriter() as files:
        numbers = (fail_at("prepare", i) for i in range(9))
        for number, _, _ in run_ahead(numbers, dispatch, lambda x, _: fail_at("collect", x)):
            files.write(write, number)
            fail_at("caller", number)
    assert (error.type is KeyboardInterrupt) == (place == "caller")
    assert {*written} >= ({0} if place in ("prepare", "dispatch") else {0, 1, 2})
    assert (3 in written) == (place == "caller")
    del error
    while threading.active_count() > threads:
        time.sleep(0.01)
