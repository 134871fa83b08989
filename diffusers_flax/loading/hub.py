"""Files in directories and on the Hugging Face Hub; models that are one file."""

import functools
import logging
import os
import re
from pathlib import Path
from urllib.parse import unquote

import httpx2
from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from diffusers_flax.loading.files import read_json
from diffusers_flax.loading.single_file import (
    DEFAULT_CONFIGS,
    SINGLE_FILE_SUFFIXES,
    SingleFile,
    check_content,
)
from diffusers_flax.messages import one_line

logger = logging.getLogger(__name__)

WEIGHTS_SUFFIXES = (*SINGLE_FILE_SUFFIXES, ".msgpack")
PLACE_ON_THE_HUB = re.compile(
    r"(?:https?://)?(?:huggingface\.co|hf\.co)/([^/]+/[^/]+)/(?:blob|resolve)/([^/]+)/([^?#]+)"
    r"(?:[?#].*)?"
)


def take_hub_options(kwargs):
    """Remove the options for huggingface_hub.hf_hub_download from keyword arguments.

    Returns:
        {"cache_dir", "force_download", "local_files_only", "token": value}, where given.
    """
    kwargs.pop("resume_download", None)  # downloads always resume
    if kwargs.get("proxies") is None:
        kwargs.pop("proxies", None)
    if (token := kwargs.pop("use_auth_token", None)) is not None:  # the old name
        kwargs.setdefault("token", token)
    names = ("cache_dir", "force_download", "local_files_only", "token")
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def refuse_push_to_hub(push_to_hub):
    """Raise a ValueError if the published argument push_to_hub is True."""
    if push_to_hub:
        raise ValueError("push_to_hub=True is not supported; save, then `hf upload` the directory")


def place_in_words(source, subfolder=None, revision=None):
    """Where files are looked for, for an error message."""
    if isinstance(source, SingleFile):
        return place_in_words(source.configs, subfolder or source.component)
    where = f"{source}{f'/{subfolder}' if subfolder else ''}"
    if os.path.isdir(source):
        return where
    where += f" (not a directory, so looked up on the hub, revision {revision or 'main'}"
    if constants.HF_HUB_OFFLINE:
        where += f"; HF_HUB_OFFLINE is set, so run hf download {source} where there is a network"
    return f"{where})"


def fetch_file(source, name, subfolder=None, revision=None, **hub_options):
    """Path of a file in a directory or hub repository, downloaded if necessary; None: missing.

    A SingleFile stands for its configs, of a pipeline or of the component alone. hub_options: see
    take_hub_options.
    """
    if isinstance(source, SingleFile):
        component = subfolder or source.component
        file = fetch_file(source.configs, name, component, **hub_options)
        if file is None and component == source.component:  # in the directory itself
            file = fetch_file(source.configs, name, **hub_options)
        return file
    if str(source).endswith(SINGLE_FILE_SUFFIXES) and Path(source).is_file():
        raise ValueError(f"{source} is one file; open it with from_single_file")
    if os.path.isdir(source):
        file = Path(source, subfolder or "", name)
        return file if file.is_file() else None
    offline = constants.HF_HUB_OFFLINE or hub_options.get("local_files_only")
    if not offline and not hub_answers():
        hub_options["local_files_only"] = True
    place = {"subfolder": subfolder or None, "revision": revision}
    try:
        return Path(hf_hub_download(str(source), name, **place, **hub_options))
    except EntryNotFoundError:  # not in the repository, or offline and not in the cache
        return None
    except HFValidationError:
        raise ValueError(
            f"{source} is not a directory and cannot be a hub id (owner/name); check the path"
        ) from None
    except HfHubHTTPError as error:
        raise ValueError(
            f"{source} is not a directory, and the hub refuses it: {one_line(error)}"
        ) from error


def fetch_config(source, name, subfolder=None, revision=None, **hub_options):
    """(content, Path) of the JSON file of fetch_file; (None, None): missing.

    A SingleFile adapts the content to its weights.
    """
    file = fetch_file(source, name, subfolder, revision, **hub_options)
    if file is None:
        return None, None
    content = read_json(file)
    if isinstance(source, SingleFile):
        content = source.adapt(name, subfolder, content)
    return content, file


def fetch_directory(source, names, subfolder=None, revision=None, **hub_options):
    """The directory with files of a directory or hub repository; some of them may be missing.

    Given a hub id, transformers asks the hub for many more files, and waits for each.
    """
    files = [fetch_file(source, name, subfolder, revision, **hub_options) for name in names]
    if not any(files):
        where = place_in_words(source, subfolder, revision)
        raise ValueError(f"there is no {names[0]} in {where}")
    return next(file.parent for file in files if file)


def locate(argument, source):
    """(directory or hub id, name of the file or None) of an argument's value.

    argument: its name, for the error; source: a file, a directory, or a hub id, owner/name or
    owner/name/FILE.
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
        raise ValueError(f"{argument}={source} does not exist; check the path")
    return f"{owner}/{repository}", file or None


def fetch_named(argument, source, names=(), revision=None, **hub_options):
    """Path of the file that an argument names, downloaded if necessary.

    names: files to look for, in this order, where source names none; without them a directory or
    hub id is returned as it is, and so is a SingleFile. Other arguments as for locate and
    fetch_file. A ValueError if there is no such file.
    """
    if isinstance(source, SingleFile):
        return source
    repository, name = locate(argument, source)
    names = [name] if name else names
    if not names:
        return repository
    for file_name in names:
        if file := fetch_file(repository, file_name, None, revision, **hub_options):
            return file
    where = place_in_words(repository, None, revision)
    raise ValueError(f"{argument}={source}: there is no {' or '.join(names)} in {where}")


def open_source(
    argument,
    source,
    component=None,
    configs=None,
    use_ema_weights=False,
    revision=None,
    **hub_options,
):
    """A SingleFile if an argument's value is a model's file; else the value.

    Args:
        argument: its name, for errors.
        source: as for from_single_file, or a directory or hub id.
        component, configs, use_ema_weights: of the SingleFile; configs None: of the family's
            published model.
        revision: branch, tag or commit of the hub's file.
        **hub_options: see take_hub_options.

    Raises:
        ValueError: the file is missing, damaged, or no such model.
    """
    place = source
    if link := PLACE_ON_THE_HUB.fullmatch(str(source)):
        repository, revision, name = map(unquote, link.groups())
        place = f"{repository}/{name}"
    if isinstance(source, SingleFile) or not str(place).endswith(SINGLE_FILE_SUFFIXES):
        return source
    # A directory or hub id may have the name of a file.
    if locate(argument, place)[1] is None:
        return source
    found = SingleFile(fetch_named(argument, place, revision=revision, **hub_options))
    found.component, found.use_ema_weights = component, use_ema_weights
    check_content(argument, found)
    found.configs = str(configs or DEFAULT_CONFIGS[found.family])
    return found


@functools.cache
def hub_answers():
    """Whether the hub can be reached; asked once, as hf_hub_download waits for each file."""
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except httpx2.TransportError as error:
        name = type(error).__name__
        logger.warning(f"{constants.ENDPOINT} does not answer ({name}): the cache alone is read")
        return False
    return True
