"""Names under which documents and conversations are kept."""

from __future__ import annotations

import re
import unicodedata

from kvthaw.errors import ConfigError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""A name that every request can give, and every file system has for a folder."""
ALLOWED = "at most 128 of A-Z, a-z, 0-9, '.', '_' and '-', the first a letter or a digit"


def check_kept_name(name: str, field: str) -> None:
    """Raise ConfigError for an invalid name, with a similar valid one.

    field: the name's field in the message.
    """
    if not is_name(name):
        such = f", such as {near!r}" if (near := nearest(name)) else ""
        raise ConfigError(f"{field} is {name!r}; it must be {ALLOWED}{such}")


def is_name(name: str) -> bool:
    """Return whether a text is a name."""
    return re.fullmatch(NAME, name) is not None


def nearest(text: str) -> str:
    """Return the valid name that is most similar to a text; "" if none is."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._]+", "-", plain).strip("-._")[:128]
