"""The lock of an output directory."""

import errno
import fcntl
import itertools
import os
import re
from pathlib import Path

import pytest

from diffusers_flax.training import processes
from diffusers_flax.training.processes import lock_folder


def test_a_lock_needs_the_file_that_others_find(tmp_path, monkeypatch):
    """A file that is removed between opening and locking it locks nothing."""
    path, flock = tmp_path / "new" / ".lock", fcntl.flock

    def remove_and_lock(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(file, operation)

    monkeypatch.setattr(processes, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with (
        lock_folder(path.parent),
        pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"),
        lock_folder(path.parent),
    ):
        pass
    assert not path.parent.exists()


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_lock_waits_where_the_folder_has_just_gone(tmp_path, monkeypatch, attempt):
    """The holder removes a folder that it made, between another's mkdir and open."""
    folder, real_open, attempts = tmp_path / "new", os.open, itertools.count(1)
    holder = lock_folder(folder)
    holder.__enter__()

    def end_and_open(path, *args, **options):
        if Path(path) == folder / ".lock" and next(attempts) == attempt:
            holder.__exit__(None, None, None)
            assert not folder.exists()
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", end_and_open)
    with lock_folder(folder):
        assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert next(attempts) == attempt + 2


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_folder(tmp_path):
        (line,) = caplog.messages
    assert re.fullmatch(r"\S*/.lock cannot be locked \(.*No locks available\); make sure .*", line)
