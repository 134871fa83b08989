"""Batches that run while others are prepared and written."""

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from diffusers_flax.generating.batches import (
    FileWriter,
    check_finite_images,
    run_ahead,
)


def double(number):
    return jnp.full(2, 2 * number)


def fetch(number, array):
    return np.asarray(array).tolist()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_batches_in_flight(in_flight):
    """Results come in order; with two in flight the second does not wait for the first.

    A result is there once `in_flight` batches are dispatched.
    """
    prepared, dispatched, changed = [], [], threading.Condition()

    def numbers():
        for number in range(5):
            prepared.append(number)
            yield number

    def dispatch(number):
        with changed:
            dispatched.append(number)
            changed.notify_all()
        return double(number)

    def collect(number, array):
        with changed:
            assert changed.wait_for(lambda: len(dispatched) >= min(5, number + in_flight), 10)
        return fetch(number, array)

    results = run_ahead(numbers(), dispatch, collect, None, in_flight)
    for expected, (number, result, seconds) in enumerate(results):
        assert number == expected and result == [2 * number] * 2 and seconds >= 0
        assert dispatched == list(range(min(5, number + in_flight)))
        assert len(prepared) <= len(dispatched) + 1
    assert dispatched == prepared == list(range(5))


def test_an_input_that_waits_for_an_earlier_result():
    """The preparing thread may wait for files of batches in flight."""
    written, waited = [], []
    with FileWriter() as files:

        def numbers():
            for number in range(6):
                if number % 2:
                    files.wait_for(number - 1)
                    waited.append(number - 1 in written)
                yield number

        for number, _, _ in run_ahead(numbers(), double, fetch):
            files.write(number, written.append, number)
    assert sorted(written) == list(range(6)) and waited == [True] * 3


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
        return double(fail_at("dispatch", number))

    def collect(number, array):
        return fetch(fail_at("collect", number), array)

    with pytest.raises((ValueError, KeyboardInterrupt)) as error, FileWriter() as files:
        for number, _, _ in run_ahead((fail_at("prepare", i) for i in range(9)), dispatch, collect):
            files.write(number, write, number)
            fail_at("caller", number)
    assert (error.type is KeyboardInterrupt) == (place == "caller")
    assert {*written} >= ({0} if place in ("prepare", "dispatch") else {0, 1, 2})
    assert (3 in written) == (place == "caller")
    del error
    while threading.active_count() > threads:
        time.sleep(0.01)


def test_wait_for_raises_the_error_of_the_writer():
    def fail():
        raise OSError("full")

    with pytest.raises(OSError, match="full"), FileWriter() as files:
        own, other = (ThreadPoolExecutor(1).submit(files.wait_for, name) for name in "ab")
        files.write("a", fail)
        assert isinstance(own.exception(timeout=10), OSError)  # at once
    assert isinstance(other.exception(timeout=10), OSError)


def test_wait_for_after_the_end():
    with FileWriter() as files:
        files.write("a", int)
    files.wait_for("a")
    waiting = ThreadPoolExecutor(1).submit(files.wait_for, "b")
    assert isinstance(waiting.exception(timeout=10), CancelledError)


def test_images_that_are_not_finite_suspect_the_lora_first():
    images = np.zeros((2, 8, 8, 3))
    check_finite_images(images, "images from 0 on", ("a.safetensors",))
    images[1, 2, 3, 0] = np.nan
    with pytest.raises(ValueError, match=r"^images from 0 on are NaN; try it with --dtype float32"):
        check_finite_images(images, "images from 0 on")
    with pytest.raises(ValueError, match=r"try it without --lora a b:2, then with --dtype float32"):
        check_finite_images(images, "images from 0 on", ("a", "b:2"))
