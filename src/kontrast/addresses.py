"""Addresses of data that are not in this machine's file system: what they look like, and their credentials.

A recipe, a run folder, a log and an error contain an address without its user, password and query. `bare` removes
them and keeps them in this process, from where `with_credentials` adds them when the address is opened.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import unquote

from kontrast.errors import UsageError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CHAINED = re.compile(r"[A-Za-z0-9_]+::.*://")
_INSIDE = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://\S*")
WRAPPERS = frozenset(
    {"async_wrapper", "blockcache", "cached", "dask", "dir", "filecache", "generic", "jlab", "jupyter", "libarchive"}
    | {"reference", "simplecache", "tar", "zip"}
)
"""Protocols that lead to other addresses, or that evaluate what they read."""
_credentials: dict[str, tuple[str, str]] = {}
"""User and password, and query, of each server or bucket (`https://host`) that this process was given."""


class _Parts(NamedTuple):
    protocol: str
    user: str
    place: str
    query: str


def is_address(text: object) -> bool:
    """Return whether a source is an address such as `s3://bucket/photos`, and not a path or a name."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def protocol_of(address: str) -> str:
    """Return the protocol of an address: "s3" of `s3://bucket/photos`."""
    return address.partition("://")[0].lower()


def bare(source: str) -> str:
    """Return a source without credentials, which this process remembers; `file:///photos` becomes a path.

    Example:
        >>> bare("https://user:secret@example.org/photos?token=1"), bare("file:///photos"), bare("photos")
        ('https://example.org/photos', '/photos', 'photos')
    """
    if not is_address(source):
        if _CHAINED.match(source):
            raise UsageError(f"{shown(source)!r}: addresses with :: are not read; give that of the images themselves")
        return source
    protocol, user, place, query = _parts(source)
    if protocol in WRAPPERS:
        raise UsageError(f"{protocol}:// is not read: it leads to other addresses; give that of the images themselves")
    if protocol == "file":
        return unquote(place) or "/"
    if query and protocol not in ("http", "https"):
        raise UsageError(f"{protocol}://{place} must not be followed by ?...: set options by environment variables")
    address = f"{protocol}://{place.rstrip('/') or place}"
    if user or query:
        _credentials[_server(address)] = user, query
    return address


def shown(text: str) -> str:
    """Return a text, such as an argument of a command, with all addresses in it as they may be recorded.

    Example:
        >>> shown("data.source=s3://KEY:SECRET@bucket/photos")
        'data.source=s3://bucket/photos'
    """

    def hide(found: re.Match[str]) -> str:
        protocol, _, place, _ = _parts(found[0])
        return f"{protocol}://{place}"

    return _INSIDE.sub(hide, text)


def _parts(address: str) -> _Parts:
    """The parts of an address. A user without a password is a part of the place, unless it is a web server's."""
    protocol, _, rest = address.partition("://")
    protocol = protocol.lower()
    if protocol in ("s3", "s3a"):  # a secret key may contain slashes, and the name of a bucket no colon
        secret = re.match(r"([^/:@]+:[^@]+)@", rest)
    elif protocol in ("http", "https"):
        secret = re.match(r"([^/@]+)@", rest)
    else:
        secret = re.match(r"([^/@:]*:[^/@]*)@", rest)
    place, _, query = (rest[secret.end() :] if secret else rest).partition("?")
    return _Parts(protocol, secret[1] if secret else "", place, query)


def _server(address: str) -> str:
    return "/".join(address.split("/")[:3])


def with_credentials(address: str) -> str:
    """Return an address with the user, password and query that this process was given for its server."""
    user, query = _credentials.get(_server(address), ("", ""))
    protocol, _, place = address.partition("://")
    return f"{protocol}://{f'{user}@' if user else ''}{place}{f'?{query}' if query else ''}"


def user_of(address: str) -> tuple[str, str]:
    """Return the user and the password that this process was given for the server of an address; empty if none."""
    user, _, password = _credentials.get(_server(address), ("", ""))[0].partition(":")
    return unquote(user), unquote(password)


def known_credentials() -> dict[str, tuple[str, str]]:
    """Return the credentials of this process, for the processes that decode for it."""
    return dict(_credentials)


def remember(credentials: dict[str, tuple[str, str]]) -> None:
    """Add the credentials of the process that this one decodes for."""
    _credentials.update({server: (user, query) for server, (user, query) in credentials.items()})


def without_secrets(message: str) -> str:
    """Return a message of a library without any address's query and without the secrets that this process was given."""
    for user, query in _credentials.values():
        values = (part.partition("=")[2] for part in query.split("&"))
        for secret in filter(None, (user, query, user.partition(":")[2], *values)):
            message = message.replace(secret, "...")
    return shown(message)


def absolute(place: str | os.PathLike[str]) -> str:
    """Return an address as it is, and the absolute path of anything else."""
    text = os.fspath(place)
    return text if is_address(text) else os.path.abspath(text)
