"""Files of directories and of the Hugging Face Hub."""

import logging
import os
import time
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from diffusers_flax.messages import one_line

logger = logging.getLogger(__name__)

ASK_AGAIN_AFTER = 60  # seconds that an answer holds
TRIES = 3  # of a hub that fails at once, a second apart
_hub = {"asked": None, "answers": True}  # time.monotonic() of the question, and its result
WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".msgpack")


def take_hub_options(kwargs):
    """Remove the hub's options from keyword arguments.

    Returns:
        {name: value} for huggingface_hub.hf_hub_download.

    Raises:
        ValueError: proxies is given, which the hub client does not take.
    """
    kwargs.pop("resume_download", None)  # downloads always resume
    if (token := kwargs.pop("use_auth_token", None)) is not None:  # the old name
        kwargs.setdefault("token", token)
    if kwargs.pop("proxies", None) is not None:
        raise ValueError("proxies= is not supported; set the environment variable HTTPS_PROXY")
    names = ("cache_dir", "force_download", "local_files_only", "token")
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def refuse_push_to_hub(push_to_hub):
    """Raise a ValueError if a published push_to_hub argument is True."""
    if push_to_hub:
        raise ValueError("push_to_hub=True is not supported; save, then `hf upload` the directory")


def place_in_words(source, subfolder, revision):
    """Describe for an error message where files are searched."""
    where = f"{source}{f'/{subfolder}' if subfolder else ''}"
    if os.path.isdir(source):
        return where
    return f"{where} (not a directory, so looked up on the hub, revision {revision or 'main'})"


def fetch_file(source, name, subfolder, revision, **hub_options):
    """Path of a file of a directory or hub repository, downloaded if necessary; None if missing.

    hub_options: see take_hub_options.
    """
    if os.path.isdir(source):
        file = Path(source, subfolder or "", name)
        return file if file.is_file() else None
    try:
        offline = constants.HF_HUB_OFFLINE or hub_options.get("local_files_only")
        if not offline and not hub_answers(str(source), name, hub_options.get("token")):
            hub_options["local_files_only"] = True
        return Path(
            hf_hub_download(
                str(source), name, subfolder=subfolder or None, revision=revision, **hub_options
            )
        )
    except EntryNotFoundError:  # not in the repository, or offline and not in the cache
        return None
    except HFValidationError:
        raise ValueError(
            f"{source} is not a directory and cannot be a hub id (owner/name); check the path"
        ) from None
    except HfHubHTTPError as error:
        message = f"{source} is not a directory, and the hub refuses it: {one_line(error)}"
        raise ValueError(message) from error


def fetch_directory(source, names, subfolder=None, revision=None, **hub_options):
    """The directory that has files of a directory or hub repository; missing files are left out.

    transformers, given a hub id, asks the hub for many files more, and waits for each of them.

    Raises:
        ValueError: none of the files exists.
    """
    files = [fetch_file(source, name, subfolder, revision, **hub_options) for name in names]
    if not any(files):
        where = place_in_words(source, subfolder, revision)
        raise ValueError(f"there is no {names[0]} in {where}")
    return next(file.parent for file in files if file)


def locate(flag, source):
    """(directory or hub id, name of the file or None) of the value of a flag.

    source: file, directory, or hub id, owner/name or owner/name/FILE; a ValueError if it is none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return str(path.parent), path.name
    if path.is_dir():
        return str(path), None
    owner, _, rest = str(source).partition("/")
    repository, _, file = rest.partition("/")
    is_file = repository.endswith(WEIGHTS_SUFFIXES) or (file and path.parent.is_dir())
    if not (owner and repository) or owner.startswith((".", "~")) or is_file:
        raise ValueError(f"{flag} {source} does not exist; check the path")
    return f"{owner}/{repository}", file or None


def fetch_source(flag, source, **hub_options):
    """Path of the file that a flag names, downloaded if necessary; else the directory or hub id.

    flag, source: as for locate; hub_options: see take_hub_options.
    """
    repository, name = locate(flag, source)
    if name is None:
        return repository
    file = fetch_file(repository, name, None, None, **hub_options)
    if file is None:
        raise ValueError(
            f"{flag} {source}: neither the hub nor the cache has {name} of {repository}"
        )
    return file


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
