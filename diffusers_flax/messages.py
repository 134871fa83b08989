"""Texts of errors and warnings."""

import functools
import logging

logger = logging.getLogger(__name__)


def one_line(error: BaseException | str, limit: int | None = None) -> str:
    """What an exception says, on one line of at most `limit` characters; its type if nothing."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


@functools.cache
def warn_once(message):
    """Log a warning, once per process."""
    logger.warning(message)
