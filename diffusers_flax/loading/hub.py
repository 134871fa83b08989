"""Whether the Hugging Face Hub can be reached."""

import logging
import time

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError

logger = logging.getLogger(__name__)

ASK_AGAIN_AFTER = 60  # seconds that an answer holds
TRIES = 3  # of a hub that fails at once, a second apart
_hub = {"asked": None, "answers": True}  # time.monotonic() of the question, and its result


def hub_answers(source, name, token):
    """Whether the hub can be reached, asked once a minute for all files.

    hf_hub_download waits and retries for every file that is not in the cache, such as optional
    ones, so a cached model would take minutes to open.

    Args:
        source, name: hub id and a file in it, existing or not.
        token: as for hf_hub_download.
    """
    if _hub["asked"] is not None and time.monotonic() - _hub["asked"] < ASK_AGAIN_AFTER:
        return _hub["answers"]
    for tries_left in reversed(range(TRIES)):
        started = time.monotonic()
        reason = ask(source, name, token)
        if not reason or not tries_left or time.monotonic() - started > 1:
            break
        time.sleep(1)
    _hub.update(asked=time.monotonic(), answers=not reason)
    if reason:
        logger.warning(
            f"{constants.ENDPOINT} does not answer ({reason}); for a minute models are read from "
            "the cache alone"
        )
    return not reason


def ask(source, name, token):
    """Why the hub does not answer; "" if it does: not found and no access are answers as well."""
    try:
        url, timeout = hf_hub_url(source, name), constants.HF_HUB_ETAG_TIMEOUT
        get_hf_file_metadata(url, token=token, timeout=timeout)
    except HfHubHTTPError as error:
        status = error.response.status_code
        return f"HTTP {status}" if status >= 500 else ""
    except httpx2.TransportError as error:
        return type(error).__name__
    return ""
