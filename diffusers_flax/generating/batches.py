"""Batches of images: splitting a list, keeping the devices busy, writing files.

    with FileWriter() as files:
        for batch, images, seconds in run_ahead(batches, dispatch, collect):
            for file, image in zip(batch.files, images):
                files.write(save_image, image, file)

While the devices run a batch, a thread prepares the next one, which is dispatched before the first
results are fetched; other threads write the files of the previous batch.
"""

import math
import time
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

IN_FLIGHT = 2  # batches on the devices: one runs, the next one waits
NUM_WRITERS = 8  # threads that write images; compressing a PNG takes longer than all else
MAX_WAITING = 40  # images in memory


def rounds_of(requests):
    """The round of each image, from 0; an edit of another's output is in a later round.

    requests: objects with after, the place of another one or None, without circles.
    """

    def round_of(request):
        return 0 if request.after is None else 1 + round_of(requests[request.after])

    return [round_of(request) for request in requests]


def devices_for(num_images, layout=None):
    """The local devices for a number of images, or the first device of each group of a layout."""
    return jax.local_devices()[:num_images] if layout is None else layout.groups


def batches_of_places(rounds_and_kinds, todo, batch_size, num_devices):
    """Split images into batches of one round and kind; the last batch of each is padded.

    Args:
        rounds_and_kinds: the (round, kind) of each image; the rounds run one after another.
        todo: places of the images to make.
        batch_size: images per device at once, at most.
        num_devices: number of devices.

    Returns:
        List of (round, kind, places of the images, padded to fill the devices, number without
        padding).
    """
    places_of, largest, batches = defaultdict(list), defaultdict(int), []
    for place, round_and_kind in enumerate(rounds_and_kinds):
        places_of[round_and_kind].append(place)
    for (_, kind), places in places_of.items():
        largest[kind] = max(largest[kind], len(places))
    todo = {*todo}
    for number, kind in sorted(places_of, key=lambda round_and_kind: round_and_kind[0]):
        # It does not depend on what is made already, so that an image does not either.
        at_once = min(batch_size, math.ceil(largest[kind] / num_devices)) * num_devices
        places = [place for place in places_of[number, kind] if place in todo]
        for start in range(0, len(places), at_once):
            batch = places[start : start + at_once]
            padded = batch + batch[-1:] * (at_once - len(batch))
            batches.append((number, kind, padded, len(batch)))
    return batches


def largest_round(requests):
    """The number of images of the largest of rounds_of."""
    return max(Counter(rounds_of(requests)).values())


def run_ahead(batches, dispatch, collect, in_flight=IN_FLIGHT):
    """Run batches on devices; prepare and dispatch the next ones meanwhile.

    Args:
        batches: iterable; a thread advances it one batch ahead.
        dispatch: batch -> arrays on devices; does not wait for them.
        collect: (batch, arrays) -> the result on the host.
        in_flight: maximum number of dispatched batches that are not yet yielded; with 1 nothing
            runs while the caller works.

    Yields:
        (batch, result, seconds on the devices), in order. The seconds of the first batch of a
        shape include its compilation.
    """
    batches, end, running, ready = iter(batches), object(), deque(), 0.0
    preparer = ThreadPoolExecutor(1)
    try:
        following = preparer.submit(next, batches, end)
        while running or following:
            if following and len(running) < in_flight:
                batch, following = following.result(), None
                if batch is not end:
                    started = time.perf_counter()
                    running.append((batch, dispatch(batch), started))
                    following = preparer.submit(next, batches, end)
                continue
            batch, arrays, started = running.popleft()
            jax.block_until_ready(arrays)
            before, ready = ready, time.perf_counter()
            yield batch, collect(batch, arrays), ready - max(started, before)
    finally:  # after an error or Ctrl-C without waiting
        preparer.shutdown(wait=False, cancel_futures=True)


class FileWriter:
    """Writes files in threads, and waits for them at the end of its `with` block.

    An error is raised at a later file or at the end of the block. After an exception in the block,
    such as Ctrl-C, submitted files are still written.
    """

    def __init__(self):
        self._waiting, self._pool = deque(), ThreadPoolExecutor(NUM_WRITERS)

    def __enter__(self):
        return self

    def write(self, function, *args):
        """Have a thread call function(*args), which writes a file; blocks if many are waiting."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(function, *args))

    def wait(self):
        """Wait for all files so far, in any thread."""
        for file in [*self._waiting]:
            file.result()

    def __exit__(self, error_type, error, trace):
        self._pool.shutdown()
        if error is None:
            self.wait()


def check_finite_images(images, which):
    """Raise a ValueError with a remedy if images are not finite; which: what they are."""
    if not np.isfinite(images).all():
        raise ValueError(
            f"{which} are NaN; try --dtype float32, and no --lora; else the model is broken"
        )
