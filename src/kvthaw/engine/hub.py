"""Whether the Hugging Face hub answers, asked before anything slow is imported or tried."""

from __future__ import annotations

import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from threading import Thread

from kvthaw.errors import ConfigError

SHIPPED = "shipped"
"""The name of the model that comes with the package."""
_SECONDS = 3.0
"""How long the hub has to answer, name resolution included; transformers itself tries for the better part of a minute."""


def offline(name: str) -> bool:
    """Return whether a model must come from the hub's local cache, since the hub does not answer: never the one that ships, nor a
    folder. Raises ConfigError where the local cache does not hold it."""
    if name == SHIPPED or is_path(name):
        return False
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and answers(constants.ENDPOINT):
        return False
    if not Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots").is_dir():
        raise ConfigError(f"model is {name!r}; no folder and no cached model has that name, and the hub cannot be reached")
    return True


def is_path(name: str) -> bool:
    """Return whether a model's name is that of a folder, which need not exist, and no id on the hub."""
    return not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def display_name(name: str) -> str:
    """Return what results call a model: no folders of this machine."""
    return Path(name).expanduser().resolve().name if name.startswith((".", "/", "~")) else name


@cache
def answers(endpoint: str) -> bool:
    """Return whether a server answers in time."""
    found: list[bool] = []
    ask = Thread(target=lambda: found.append(_asked(endpoint)), daemon=True)
    ask.start()
    ask.join(_SECONDS)
    return found == [True]


def _asked(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code not in (403, 407)  # which a proxy answers for it
    except (OSError, ValueError):
        return False
    return True
