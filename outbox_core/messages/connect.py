"""connect(url): from a URL to a Broker, by entry point, so that nothing here imports an adapter."""

from __future__ import annotations

from importlib.metadata import entry_points
from urllib.parse import urlsplit

from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Broker

ENTRY_POINT_GROUP = "outbox.brokers"


def connect(url: str, **options: object) -> Broker:
    """A Broker for this URL, e.g. `http://127.0.0.1:7788` or `embedded:./broker-data`; does no I/O until it is used.

    `options` go to the adapter as they are (http: token, timeout_ms, ca_file...). Raises ConfigurationError for a URL
    whose scheme has no adapter installed.
    """
    scheme = _scheme(url)
    found = entry_points(group=ENTRY_POINT_GROUP, name=scheme) if scheme else ()
    for entry_point in found:
        try:
            adapter = entry_point.load()
        except ModuleNotFoundError as error:
            extra = {"https": "http", "embedded": "broker"}.get(scheme, scheme)
            raise ConfigurationError(
                f"the {scheme} adapter needs the package {error.name!r}, which comes with the extra {extra!r}: "
                f"pip install '.[{extra}]' in a checkout"
            ) from error
        broker: Broker = adapter(url, **options)
        return broker
    known = sorted({entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)})
    raise ConfigurationError(
        f"no broker adapter for the URL {_shown(url)}; known schemes: {', '.join(known) or 'none'}; "
        "a broker's URL looks like http://127.0.0.1:7788"
    )


def _scheme(url: str) -> str:
    """The URL's scheme; a port that is none is said now, and not by the first request."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigurationError(
            "not a broker's URL: its address or its port cannot be read; use one like http://127.0.0.1:7788"
        ) from error
    return parts.scheme


def _shown(url: str) -> str:
    """The URL without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    if not parts.scheme:
        return repr(url)
    host = parts.netloc.rpartition("@")[2]
    return repr(f"{parts.scheme}://{host}{parts.path}" if host else f"{parts.scheme}:{parts.path}")
