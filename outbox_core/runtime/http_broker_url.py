"""Splits an HTTP broker's URL into its address and its options: the files of the token and of trusted certificates.

Many programs are given a URL alone, such as that of a `?delay=`, so all that a broker asks for can be said in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qsl

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.config_files import read_optional_secret

OPTIONS: Final = ("token_file", "ca_file")


def check_token(token: str | None) -> None:
    """Raise ConfigurationError for a token that no header can carry; a client's library would quote it in its error."""
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ConfigurationError("a token is printable ASCII, and not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBrokerUrl:
    """The parts of `https://host:7788/path?token_file=FILE&ca_file=FILE`. `address` is what stands before the `?`."""

    address: str
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL, and the token's file. Raises ConfigurationError for a file that cannot be read, and for an
        option that is unknown.
        """
        address, _, query = url.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        for name in options:
            if name not in OPTIONS:
                near = get_close_matches(name, OPTIONS, 1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(OPTIONS)}, delay"
                raise ConfigurationError(f"the URL of an HTTP broker has the unknown option {name!r}; {hint}")
        token_file = options.get("token_file")
        token = read_optional_secret(None if token_file is None else Path(token_file), what="token")
        return cls(address=address, token=token, ca_file=options.get("ca_file"))
