"""Whether the Hugging Face Hub can be reached."""

import logging
import time

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError

logger = logging.getLogger(__name__)

ASK_AGAIN_AFTER = 60  # seconds, after which a hub that did not answer is asked again
_hub = {"asked": None, "answers": True}  # time.monotonic() of the question, and its result


def hub_answers(source, name, token):
    """Whether the hub can be reached, asked once for all files.

    hf_hub_download waits and retries for every file that is not in the cache, such as optional
    ones, so a cached model would take minutes to open.

    Args:
        source, name: hub id and a file in it, existing or not.
        token: as for hf_hub_download.
    """
    now = time.monotonic()
    if _hub["asked"] is not None and (_hub["answers"] or now - _hub["asked"] < ASK_AGAIN_AFTER):
        return _hub["answers"]
    reason = None
    try:
        url, timeout = hf_hub_url(source, name), constants.HF_HUB_ETAG_TIMEOUT
        get_hf_file_metadata(url, token=token, timeout=timeout)
    except HfHubHTTPError as error:  # not found and no access are answers as well
        status = error.response.status_code
        reason = f"HTTP {status}" if status >= 500 else None
    except httpx2.TransportError as error:
        reason = type(error).__name__
    _hub.update(asked=time.monotonic(), answers=reason is None)
    if reason:
        logger.warning(
            f"{constants.ENDPOINT} does not answer ({reason}); models are read from the cache"
        )
    return reason is None
