"""Batches that run while others are prepared and written; finding the images that exist."""

import os
import re
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusers_flax.images import image_mark, save_image
from generating.batches import DeviceClock, FileWriter, run_ahead
from generating.resuming import continue_images, id_maker, is_finished


def double(number):
    return jnp.full(2, 2 * number)


def fetch(number, array):
    return np.asarray(array).tolist()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_batches_in_flight(in_flight):
    """Results come in order; of two in flight the second is dispatched before the first is there.

    The result of each is there once `in_flight` batches are dispatched.
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
    """The preparing thread may wait for the files of batches that are in flight."""
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
    """Files that were given to the writer before are complete, and no thread goes on."""
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
    assert {*written} >= {0, 1, 2}
    assert (3 in written) == (place == "caller")
    del error
    while threading.active_count() > threads:
        time.sleep(0.01)


def test_who_waits_for_a_file_that_is_never_written_is_told():
    told = threading.Event()

    def wait(files):
        try:
            files.wait_for("b")
        except OSError:
            told.set()

    def fail():
        raise OSError("full")

    with pytest.raises(OSError, match="full"), FileWriter() as files:
        thread = threading.Thread(target=wait, args=(files,))
        thread.start()
        files.write("a", fail)
    thread.join(10)
    assert told.is_set()


def test_who_waits_for_a_file_after_the_end_is_told():
    with FileWriter() as files:
        files.write("a", int)
    files.wait_for("a")
    waiting = ThreadPoolExecutor(1).submit(files.wait_for, "b")
    assert isinstance(waiting.exception(timeout=10), CancelledError)


def test_devices_that_wait_for_a_slow_collector():
    """Fetching results counts as waiting: nearly the whole run, if the programs take no time."""
    clock = DeviceClock()
    for _ in run_ahead(range(8), np.ones, lambda *_: time.sleep(0.05), clock):
        pass
    assert float(re.search(r"waited (\S+)%", clock.report(8))[1]) > 70


def test_the_share_of_time_that_devices_wait(monkeypatch):
    clock, now = DeviceClock(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock.add(dispatched=10.0, ready=20.0)  # before: compiling
    assert clock.report(4) == ""
    clock.add(dispatched=15.0, ready=30.0)
    clock.add(dispatched=31.0, ready=40.0)
    now[0] = 42.0
    assert clock.report(12) == (
        "12 images in 32.0 s after compiling; the devices waited 9.4% of the time"
    )


@dataclass(frozen=True)
class Config:
    model: str
    lora: tuple = ()
    eta: float | None = None
    seed: int = 0
    batch_size: int = 1
    grid: str | None = None
    accelerate: tuple = ()
    vae_tile: int | None = None
    preview: int | None = None
    preview_decoder: str = ""


def test_what_the_number_of_an_image_depends_on(tmp_path):
    model, lora = tmp_path / "model", tmp_path / "a.safetensors"
    (model / "unet").mkdir(parents=True)
    (model / "unet" / "weights.bin").write_text("1")
    lora.write_text("1")
    config = Config(str(model), lora=(f"{lora}:0.5",))
    number = id_maker(config)(prompt="red", index=0)
    assert len(number) == 32 and int(number, 16)
    for same in (config, replace(config, batch_size=2, grid="grid.png")):
        assert id_maker(same)(prompt="red", index=0) == number
    make_id = id_maker(config)
    others = {make_id(prompt="blue", index=0), make_id(prompt="red", index=1)}
    for changes in ({"seed": 1}, {"eta": 0.0}, {"lora": (f"{lora}:0.6",)}, {"lora": ()}):
        others.add(id_maker(replace(config, **changes))(prompt="red", index=0))
    lora.write_text("12")
    others.add(id_maker(config)(prompt="red", index=0))
    lora.write_text("1")
    os.utime(model / "unet" / "weights.bin", ns=(1, 1))
    others.add(id_maker(config)(prompt="red", index=0))
    assert len(others - {number}) == 8


def test_what_the_number_of_an_image_does_not_depend_on(tmp_path, monkeypatch):
    """Images that the program writes, and flags that make the same image."""
    monkeypatch.chdir(tmp_path)
    taesd = tmp_path / "taesd"
    for folder in ("model/unet", "taesd"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "weights.safetensors").write_text("1")
    chosen = ("deepcache", f"taesd:path={taesd}")
    config = Config("model", lora=("owner/lora:0.5",), accelerate=chosen)
    number = id_maker(config)(index=0)
    for output in ("deepcache", "path", "owner/lora", "0.5", "model", "model/output"):
        folder = tmp_path / output
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("000.png", "a.jpg"):
            save_image(np.zeros((8, 8, 3)), folder / name)
        assert id_maker(config)(index=0) == number
    for same in ({"vae_tile": 0}, {"preview": 5}, {"preview_decoder": str(taesd)}):
        assert id_maker(replace(config, **same))(index=0) == number
    assert id_maker(replace(config, vae_tile=512))(index=0) != number
    (taesd / "weights.safetensors").write_text("12")
    assert id_maker(config)(index=0) != number


def test_the_grid_is_no_image_of_an_interrupted_run(tmp_path):
    ids = [f"{i:032x}" for i in range(4)]
    for i in (0, 1, 3):
        save_image(np.zeros((8, 8, 3)), tmp_path / f"{i:03}.png", "a.py", ids[i])
    new = [tmp_path / f"{4 + i:03}.png" for i in range(4)]
    for number in (0, 2):  # exists, is missing
        with pytest.raises(ValueError, match=rf"--grid .*/{number:03}\.png is an image of"):
            continue_images(new, ids, tmp_path, "a.py", tmp_path / f"{number:03}.png")
    files, missing = continue_images(new, ids, tmp_path, "a.py", tmp_path / "004.png")
    assert missing == [2] and files[2] == tmp_path / "002.png"


def test_images_of_a_folder_that_exist(tmp_path):
    """Names go on after other images; those of an interrupted run are kept."""
    ids = [f"{i:032x}" for i in range(4)]
    image = np.zeros((8, 8, 3))

    def folder(*images):
        """Of images: None is not by us, else the place of its number."""
        for file in tmp_path.iterdir():
            file.unlink()
        for number, place in enumerate(images):
            if place != "free":
                mark = () if place is None else ("a.py", ids[place])
                save_image(image, tmp_path / f"{number:03}.png", *mark)
        new = [tmp_path / f"{len(images) + i:03}.png" for i in range(4)]
        files, missing = continue_images(new, ids, tmp_path, "a.py")
        return [int(file.stem) for file in files], missing

    assert folder() == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert folder(None, None) == ([2, 3, 4, 5], [0, 1, 2, 3])
    assert folder(0, 1) == ([0, 1, 2, 3], [2, 3])
    assert folder(None, "free", 1, "free", 3) == ([1, 2, 3, 4], [0, 2])
    assert folder(0, 1, 2, 3) == ([0, 1, 2, 3], [])
    assert folder(0, 1, None) == ([0, 1, 5, 6], [2, 3])  # something else has the name
    assert folder(1) == ([1, 0, 3, 4], [0, 2, 3])  # which would be -1


def test_an_image_that_exists_is_replaced_if_it_is_ours(tmp_path):
    image, number = Image.new("RGB", (8, 8)), "0" * 32
    for name in ("a.png", "a.jpg"):
        file = tmp_path / name
        assert not is_finished(file, number, "a.py")
        save_image(image, file, "a.py", number)
        assert image_mark(file) == ("a.py", number)
        assert is_finished(file, number, "a.py")
        assert not is_finished(file, "1" * 32, "a.py")
        image.save(file)
        with pytest.raises(ValueError, match="exists, is not by a\\.py and would be overwritten"):
            is_finished(file, number, "a.py")
        file.write_text("text")
        assert image_mark(file) == (None, None)
