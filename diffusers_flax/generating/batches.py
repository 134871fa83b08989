"""Batches of images: splitting a list, keeping the devices busy, writing files.

    clock = DeviceClock()
    with FileWriter() as files:
        for batch, images, seconds in run_ahead(batches, dispatch, collect, clock):
            for file, image in zip(batch.files, images):
                files.write(file, save_image, image, file)
    print(clock.report(num_images))

While the devices run a batch, a thread prepares the next one, which is dispatched before the first
results are fetched; other threads write the files of the previous batch.
"""

import math
import os
import time
from collections import Counter, defaultdict, deque
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
    wait,
)
from contextlib import suppress
from graphlib import TopologicalSorter
from threading import BoundedSemaphore

import jax
import numpy as np

from diffusers_flax.generating.sizes import num_loaders

IN_FLIGHT = 2  # batches on the devices: one runs, the next one waits
MAX_WRITERS = 8  # threads that write images; compressing a PNG takes longer than all else
WAITING_PER_WRITER = 4  # images in memory


def rounds_of(edits):
    """The round of each edit, from 0; an edit of another's output is in a later round.

    edits: objects with after, the place of another edit or None, without circles.
    """
    after = {place: [] if e.after is None else [e.after] for place, e in enumerate(edits)}
    rounds = [0] * len(edits)
    for place in TopologicalSorter(after).static_order():
        rounds[place] = max((rounds[before] + 1 for before in after[place]), default=0)
    return rounds


def devices_for(num_images, layout=None):
    """The local devices for a number of images, or the first device of each group of a layout."""
    return jax.local_devices()[:num_images] if layout is None else layout.groups


def images_at_once(rounds_and_kinds, batch_size, num_devices):
    """{kind: images per device at once}; arguments as for batches_of_places."""
    largest = defaultdict(int)
    for (_, kind), count in Counter(rounds_and_kinds).items():
        largest[kind] = max(largest[kind], count)
    return {kind: min(batch_size, math.ceil(n / num_devices)) for kind, n in largest.items()}


def batches_of_places(rounds_and_kinds, finished, batch_size, num_devices):
    """Split images into batches of one round and kind; the last batch of each is padded.

    Args:
        rounds_and_kinds: the (round, kind) of each image; the rounds run one after another.
        finished: places of images to leave out.
        batch_size: images per device at once, at most.
        num_devices: number of devices.

    Returns:
        List of (kind, places of the images, padded to fill the devices, number without padding).
    """
    places_of = defaultdict(list)
    for place, round_and_kind in enumerate(rounds_and_kinds):
        places_of[round_and_kind].append(place)
    per_device, batches = images_at_once(rounds_and_kinds, batch_size, num_devices), []
    for number, kind in sorted(places_of, key=lambda round_and_kind: round_and_kind[0]):
        places = [place for place in places_of[number, kind] if place not in finished]
        at_once = per_device[kind] * num_devices
        for start in range(0, len(places), at_once):
            batch = places[start : start + at_once]
            batches.append((kind, batch + batch[-1:] * (at_once - len(batch)), len(batch)))
    return batches


class DeviceClock:
    """Measures a run from its first dispatched program to the report; the first call compiles."""

    def __init__(self):
        self.begin = self.ready = None  # time.perf_counter() of the first dispatch, the last result
        self.num_batches = 0

    def add(self, dispatched, ready):
        """Count a batch; dispatched, ready: time.perf_counter() of dispatch and result."""
        if self.begin is None:
            self.begin = dispatched
        self.ready, self.num_batches = ready, self.num_batches + 1

    def report(self, num_images):
        """A line for the user, once all files are written; "" for a single batch."""
        if self.num_batches < 2:
            return ""
        return f"{num_images} images in {time.perf_counter() - self.begin:.1f} s after compiling"


def run_ahead(batches, dispatch, collect, clock=None, in_flight=IN_FLIGHT):
    """Run batches on devices; prepare and dispatch the next ones meanwhile.

    Args:
        batches: iterable; a thread advances it one batch ahead.
        dispatch: batch -> arrays on devices; does not wait for them.
        collect: (batch, arrays) -> the result on the host, in a thread.
        clock: DeviceClock or None.
        in_flight: maximum number of dispatched batches that are not yet yielded; with 1 nothing
            runs while the caller works.

    Yields:
        (batch, result, seconds on the devices), in order. The seconds of the first batch of a
        shape include its compilation.
    """
    clock = clock or DeviceClock()
    batches, end = iter(batches), object()

    def finish(batch, arrays, started, dispatched):
        jax.block_until_ready(arrays)
        before, ready = clock.ready, time.perf_counter()
        clock.add(dispatched, ready)
        seconds = ready - (started if before is None else max(started, before))
        return batch, collect(batch, arrays), seconds

    preparer, collector = pools = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    following, running = preparer.submit(next, batches, end), deque()
    try:
        while following or running:
            has_room = following is not None and len(running) < in_flight
            if has_room and (following.done() or not running):
                batch, following = following.result(), None
                if batch is not end:
                    started = time.perf_counter()
                    arrays = dispatch(batch)
                    dispatched = time.perf_counter()
                    running.append(collector.submit(finish, batch, arrays, started, dispatched))
                    following = preparer.submit(next, batches, end)
                batch = arrays = None  # their memory
            elif not has_room or running[0].done():
                yield running.popleft().result()
            else:
                wait([following, running[0]], return_when=FIRST_COMPLETED)
    finally:  # after an error or Ctrl-C without waiting for the devices
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def run_batches(batches, prepare, call, bar, doing, clock=None, in_flight=1):
    """Make the images of batches_of_places; threads load what the next batch needs.

    Args:
        batches: of batches_of_places; a kind is a tuple that begins with (width, height).
        prepare: (kind, places, map) -> the arrays of a call; map is that of a pool of threads.
        call: (kind, arrays) -> images on the devices, (devices, B, H, W, 3).
        bar: tqdm progress bar in units of images.
        doing: what the bar says, a verb such as "editing".
        clock, in_flight: see run_ahead.

    Yields:
        (places, images: NumPy float32 (n, H, W, 3) in [0, 1], seconds on the devices).
    """
    compiled, loaders = set(), ThreadPoolExecutor(num_loaders())

    def dispatch(prepared):
        (kind, _, _), arrays = prepared
        if kind not in compiled:
            compiled.add(kind)
            bar.set_description("compiling {}x{}".format(*kind[0]))
        return call(kind, arrays)

    def collect(prepared, images):
        images = np.asarray(images)
        return images.reshape(-1, *images.shape[2:])[: prepared[0][2]]

    try:
        ready = ((batch, prepare(*batch[:2], loaders.map)) for batch in batches)
        for prepared, images, seconds in run_ahead(ready, dispatch, collect, clock, in_flight):
            kind, places, num_images = prepared[0]
            yield places[:num_images], images, seconds
            bar.set_description("{} {}x{}".format(doing, *kind[0]))
            bar.update(num_images)
    finally:  # without waiting: after an error a thread may wait for a result that never comes
        loaders.shutdown(wait=False, cancel_futures=True)


class FileWriter:
    """Writes files in threads, and waits for them at the end of its `with` block.

    An error is raised at the next file or at the end of the block. After an exception in the block,
    such as Ctrl-C, submitted files are still written.
    """

    def __init__(self, is_writer=True):
        """is_writer: False writes nothing, as another process does."""
        self._is_writer = is_writer
        num_threads = min(MAX_WRITERS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads)
        self._places = BoundedSemaphore(num_threads * (1 + WAITING_PER_WRITER))
        self._files = {}  # Future by path; setdefault is atomic
        self._error, self._is_closed = None, False

    def __enter__(self):
        return self

    def write(self, path, function, *args):
        """Have a thread call function(*args), which writes the file; blocks if many are waiting."""
        if not self._is_writer:
            return
        self._places.acquire()
        if self._error:
            raise self._error
        self._pool.submit(self._write, path, function, args)

    def wait_for(self, path):
        """Wait in another thread until a file is written.

        Args:
            path: of `write`, called before or after this.

        Raises:
            CancelledError: the `with` block has ended without the file.
            BaseException: the error of a writing thread.
        """
        file = self._files.setdefault(path, Future())
        if self._is_closed:
            self._give_up(file)
        file.result()

    def _give_up(self, file):
        with suppress(InvalidStateError):  # it is written
            file.set_exception(self._error or CancelledError())

    def _write(self, path, function, args):
        file = self._files.setdefault(path, Future())
        try:
            function(*args)
            file.set_result(None)
        except BaseException as error:
            self._error = self._error or error
            file.set_exception(error)  # a thread may wait for it now
        finally:
            self._places.release()

    def __exit__(self, error_type, error, trace):
        try:
            self._pool.shutdown(cancel_futures=self._error is not None)
        finally:  # also after Ctrl-C: releases threads in wait_for
            self._is_closed = True
            for file in [*self._files.values()]:
                self._give_up(file)
        if self._error and error is None:
            raise self._error


def check_finite_images(images, which, lora=()):
    """Raise a ValueError with a remedy if images are not finite.

    Args:
        images: array.
        which: what the images are, for the error.
        lora: values of --lora.
    """
    if not np.isfinite(images).all():
        first = f"without --lora {' '.join(lora)}, then " if lora else ""
        raise ValueError(
            f"{which} are NaN; try it {first}with --dtype float32, and if that does not help, the "
            "model is broken"
        )
