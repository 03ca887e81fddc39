"""The parts of a broker's URL, which may name several hosts."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

_SEVERAL_HOSTS: Final = re.compile(r"([a-z][a-z0-9+.-]*):(//[^/?#]*,[^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)


def split_url(url: str) -> SplitResult:
    """The parts of a URL as urllib.parse.urlsplit has them, also where a list of hosts has IPv6 addresses.

    Python 3.14 refuses a bracket behind another host. Raises ValueError for what cannot be read.
    """
    matched = _SEVERAL_HOSTS.fullmatch(url)
    if matched is None:
        return urlsplit(url)
    scheme, hosts, rest = matched.groups()
    return urlsplit(f"{scheme}:{rest}")._replace(netloc=hosts[2:])


def shown_url(url: str) -> str:
    """A URL for logs and errors: without user, password and query, which may hold secrets."""
    parts = split_url(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if host else f"{parts.scheme}:{parts.path}"


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Returns whether a name or an address is a loopback one."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
