"""Texts of errors and warnings."""

import functools
import logging

logger = logging.getLogger(__name__)


def one_line(error: BaseException | str, limit: int | None = None) -> str:
    """An exception's text on one line, of at most `limit` characters; without text, its type."""
    text = " ".join(str(error).split())[:limit]
    return text if isinstance(error, str) else text or type(error).__name__


@functools.cache
def warn_once(message):
    """Log a warning, once per process."""
    logger.warning(message)


def first_names(names):
    """The first ten of a list of names, and the number of the others."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{', '.join(names[:10])}{more}"


def differences(saved: dict, current: dict) -> list[str]:
    """List the entries of current that differ from saved, as "NAME was A and is B"."""
    return [
        f"{name} was {saved.get(name)} and is {value}"
        for name, value in current.items()
        if saved.get(name) != value
    ]


def reason_of(error):
    """An exception's text on one line, with the type if it is not a ValueError."""
    is_ours = isinstance(error, ValueError)
    return one_line(error, 200) if is_ours else f"{type(error).__name__}: {one_line(error, 200)}"


def in_bytes(number: float) -> str:
    """A number of bytes, such as 3.4 GB."""
    unit, name = next((x for x in ((1e9, "GB"), (1e6, "MB")) if number >= x[0]), (1e3, "kB"))
    return f"{number / unit:.3g} {name}"
