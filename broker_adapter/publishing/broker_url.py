"""Parses the URL of another broker: hosts, user, password, path, typed options, and the TLS that it asks for."""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qsl, unquote

from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import split_url

TIMEOUT_MS_DEFAULT: Final = 10_000
COMMON_OPTIONS: Final = frozenset({"strict", "timeout_ms", "ca_file", "cert_file", "key_file", "password_file"})
"""What the URL of each broker may say in its query."""

URL_NAME_DEFAULT: Final = "the broker's URL"
_FLAGS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerUrl:
    """The parts of `scheme://user:password@host:port,host:port/path?option=value`, percent-decoded.

    `password` comes from `password_file` where that is given. Raises ConfigurationError for what cannot be read, and
    for an option that the adapter does not know.
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    user: str | None
    password: str | None
    path: str
    options: Mapping[str, str]
    url_name: str = URL_NAME_DEFAULT
    """What errors call it."""

    @classmethod
    def parse(cls, url: str, *, port: int, options: Collection[str] = (), url_name: str = URL_NAME_DEFAULT) -> Self:
        """Read a URL; `port` is the default, `options` are those that this adapter has besides COMMON_OPTIONS,
        `url_name` is what errors call it.
        """
        parts = split_url(url)
        login, at, addresses = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not at:
            _check_encoded((parts.path, *query, parts.fragment), url_name=url_name)
        _check_options(query, COMMON_OPTIONS | set(options), url_name=url_name)
        password_path = query.get("password_file")
        return cls(
            scheme=parts.scheme,
            hosts=tuple(host_and_port(address, port, url_name=url_name) for address in addresses.split(",")),
            user=unquote(user) or None,
            password=unquote(password) or None if password_path is None else _secret_in("password_file", password_path),
            path=unquote(parts.path.removeprefix("/")),
            options=query,
            url_name=url_name,
        )

    @property
    def addresses(self) -> str:
        """`host:port,host:port`: what logs and errors may show."""
        return ",".join(f"{_bracketed(host)}:{port}" for host, port in self.hosts)

    @property
    def is_strict(self) -> bool:
        """Whether a server that is set weaker than the adapter promises is refused."""
        return self.flag("strict", default=False)

    @property
    def timeout_ms(self) -> int:
        """The bound of each call."""
        return self.number("timeout_ms", default=TIMEOUT_MS_DEFAULT, least=100)

    def flag(self, name: str, *, default: bool) -> bool:
        """An option that is true or false."""
        if name not in self.options:
            return default
        value = _FLAGS.get(self.options[name].lower())
        if value is None:
            raise ConfigurationError(f"{name} in {self.url_name} is true or false, not {self.options[name]!r}")
        return value

    def number(self, name: str, *, default: int, least: int = 0) -> int:
        """An option that is a whole number."""
        text = self.options.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ConfigurationError(f"{name} in {self.url_name} is a whole number of at least {least}, not {text!r}")
        return int(text)

    def choice(self, name: str, *, default: str, among: Collection[str]) -> str:
        """An option that is one of a few words."""
        value = self.options.get(name, default)
        if value not in among:
            raise ConfigurationError(f"{name} in {self.url_name} is one of {', '.join(sorted(among))}, not {value!r}")
        return value

    def secret(self, name: str) -> str | None:
        """What an option's file says, without its end of line; None where the option is not given."""
        return _secret_in(name, self.options[name]) if name in self.options else None

    def file(self, name: str) -> str | None:
        """An option that names a file, which must be there."""
        value = self.options.get(name)
        if value is not None and not Path(value).is_file():
            raise ConfigurationError(f"{name} in {self.url_name} names no file: {value!r}")
        return value


def host_and_port(address: str, port: int, *, url_name: str = URL_NAME_DEFAULT) -> tuple[str, int]:
    """The parts of `host:port` or `[address]:port`; `port` where it names none. Raises ConfigurationError."""
    host, colon, port_text = address.rpartition(":")
    if not colon or port_text.endswith("]"):  # no port; or an IPv6 address without one
        host, port_text = address, str(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port_text.isascii() and port_text.isdigit()) or not 0 < int(port_text) < 65_536:
        raise ConfigurationError(f"{url_name} needs host:port, or several with commas between, not {address!r}")
    return host, int(port_text)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_encoded(behind_hosts: Collection[str], *, url_name: str) -> None:
    """Refuse a URL whose password was cut at a character that ends the hosts: errors would show the parts."""
    if any("@" in part for part in behind_hosts):
        raise ConfigurationError(
            f"{url_name} has an @ behind its hosts: percent-encode / ? # and @ in user, password and path, "
            "or give the password by password_file="
        )


def _check_options(options: Mapping[str, str], known_names: Collection[str], *, url_name: str) -> None:
    for name in options:
        if name not in known_names:
            near = difflib.get_close_matches(name, known_names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known_names))}"
            raise ConfigurationError(f"{url_name} has the unknown option {name!r}{hint}")


def _secret_in(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the broker's {name} cannot be read: {error}") from error


def tls_context(url: BrokerUrl, *, tls_schemes: frozenset[str], ca_file: str | None) -> ssl.SSLContext | None:
    """The context that the URL asks for, for clients that take one; None where its scheme is none of `tls_schemes`.

    The server's certificate is checked, by `ca_file` or the URL's, else by what this machine trusts. Raises
    ConfigurationError for certificates without TLS, and for those that cannot be read.
    """
    authorities, certificate, key = ca_file or url.file("ca_file"), url.file("cert_file"), url.file("key_file")
    if url.scheme not in tls_schemes:
        if authorities or certificate or key:
            raise ConfigurationError(
                f"ca_file, cert_file and key_file need TLS: write {min(tls_schemes)}:// in the broker's URL"
            )
        return None
    if key is not None and certificate is None:
        raise ConfigurationError("key_file needs cert_file in the broker's URL")
    try:
        context = ssl.create_default_context(cafile=authorities)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(f"the certificates of the broker's URL cannot be read: {error}") from error
    return context
