"""The server's log."""

import logging

import pytest

from diffusers_flax.app import server


def test_tracebacks_of_closed_pages_are_dropped():
    """Of an upload that breaks off, and of an image deleted while it is sent; not of others."""
    requests = pytest.importorskip("starlette.requests")

    def record(error):
        return logging.makeLogRecord({"exc_info": (type(error), error, None)})

    deleted, other = RuntimeError("File at path x does not exist."), RuntimeError("other")
    deleted.__context__, other.__context__ = FileNotFoundError(), ValueError()
    dropped = [requests.ClientDisconnect(), deleted]
    assert not any(server.NoClosedPages().filter(record(error)) for error in dropped)
    assert server.NoClosedPages().filter(record(other))
    assert server.NoClosedPages().filter(logging.makeLogRecord({}))
