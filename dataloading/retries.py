"""HTTP requests for lists of shards and their footers, repeated after failures.

    response = fetch_with_retries(url)

A request is repeated for up to MAX_REQUESTED_WAIT seconds if the server asks to wait (HTTP 429),
for up to MAX_OUTAGE_WAIT seconds if it fails or does not answer. script.sh downloads the shards
themselves and repeats on its own.
"""

import sys
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.utils import get_session, parse_ratelimit_headers
from tqdm import tqdm

RETRY_STATUS = (408, 429, 500, 502, 503, 504)
RETRY_ERRORS = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)
REQUEST_TIMEOUT = 30  # seconds without data
MAX_REQUESTED_WAIT = 600  # seconds in all; the hub's rate limit resets every 300
MAX_OUTAGE_WAIT = 60  # seconds in all, where the server does not say how long to wait

TOKEN_HELP = (
    "set HF_TOKEN to a token of an account with read access (https://hf.co/settings/tokens)"
)
ERRORS = {  # by the hub's X-Error-Code or the HTTP status
    "GatedRepo": f"the dataset is gated: ask for access on its page, then {TOKEN_HELP}",
    "RepoNotFound": f"no such dataset, or it is private; check the name or {TOKEN_HELP}",
    "RevisionNotFound": "no such revision; check --revision",
    401: f"HTTP 401, the token is missing or invalid; {TOKEN_HELP}",
    403: f"HTTP 403, access denied; {TOKEN_HELP}",
}


def fetch_with_retries(url, last_bytes=None):
    """GET with bounded retries after rate limits, server errors and network errors.

    huggingface_hub's retries are unbounded and ignore dates in Retry-After.

    Args:
        url: address; the token is sent only if it is on the hub.
        last_bytes: fetch this many bytes from the end of the file; None fetches all.

    Returns:
        httpx2 response with its content; the status may be an error that retries cannot fix.

    Raises:
        ValueError: no response within MAX_REQUESTED_WAIT or MAX_OUTAGE_WAIT seconds.
    """
    on_hub = url.startswith(f"{constants.ENDPOINT}/")  # as in script.sh
    headers = {"Authorization": f"Bearer {token}"} if on_hub and (token := get_token()) else {}
    if last_bytes:
        headers |= {"Range": f"bytes=-{last_bytes}", "Accept-Encoding": "identity"}
    options = {"headers": headers, "timeout": REQUEST_TIMEOUT}
    wait_left, outage_left, pause = MAX_REQUESTED_WAIT, MAX_OUTAGE_WAIT, 1
    while True:
        requested = None
        try:
            # httpx2 drops the token when a redirect leads to another host.
            with get_session().stream("GET", url, **options) as response:
                length = int(response.headers.get("content-length", 2**63))
                if last_bytes and response.status_code == 200 and length > last_bytes:
                    raise ValueError(f"{url}: no range requests on this server; omit --columns")
                if response.status_code not in RETRY_STATUS:
                    response.read()
                    return response
                requested = requested_wait(response.headers)
                reason = f"HTTP {response.status_code}"
        except RETRY_ERRORS as error:
            reason = str(error) or type(error).__name__
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            kind = type(error).__name__  # its text may quote the header with the token
            raise ValueError(f"{url}: {kind}; check the address, HF_ENDPOINT, HF_TOKEN") from None
        if requested is None:
            wait, pause, outage_left = pause, min(2 * pause, 16), outage_left - pause
        else:
            wait, wait_left = requested, wait_left - requested
        if min(wait_left, outage_left) < 0:
            raise ValueError(
                f"{url}: {reason}; waiting {wait:.0f} s more would exceed the limit "
                f"({MAX_REQUESTED_WAIT} s if the server asks for it, else {MAX_OUTAGE_WAIT} s); "
                "try again later"
            )
        tqdm.write(f"{urlsplit(url).netloc}: {reason}; retrying in {wait:.0f} s", file=sys.stderr)
        time.sleep(wait)


def requested_wait(headers):
    """Seconds that a response asks the client to wait, at least 1, or None.

    Source: RFC 9110, section 10.2.3 (Retry-After: seconds or a date); the hub's RateLimit header.
    """
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return max(1, int(value))
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(1, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def error_text(response):
    """The meaning of an error response and its remedy."""
    status, code = response.status_code, response.headers.get("x-error-code")
    return ERRORS.get(code) or ERRORS.get(status) or f"HTTP {status}; check the address"
