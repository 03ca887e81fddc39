"""connect(url): makes a Broker, or a timing store, from a URL. Finds adapters by entry point, and imports none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import unquote

from outbox_core.common.errors import ConfigurationError, install_hint
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.delayed_broker import DelayedBroker
from outbox_core.messages.timing_port import TimingStore
from outbox_core.messages.url_parts import shown_url, split_url

ENTRY_POINT_GROUP = "outbox.brokers"
TIMING_ENTRY_POINT_GROUP = "outbox.timing_stores"


def connect(url: str, **options: object) -> Broker:
    """Returns a Broker for this URL, e.g. `http://127.0.0.1:7788` or `embedded:./broker-data`. Does no I/O yet.

    `?delay=URL`, percent-encoded if it has a query itself, puts a delay service in front of the broker.
    `options` go to the adapter unchanged (http: token, timeout_ms, ca_file...), those that begin with `delay_` to
    the delay service's. Raises ConfigurationError for a URL whose scheme has no adapter installed, and for an option of
    a delay service that the URL does not name.
    """
    url, delay_url = _without_delay(url)
    of_delay = {name.removeprefix("delay_"): option for name, option in options.items() if name.startswith("delay_")}
    of_target = {name: option for name, option in options.items() if not name.startswith("delay_")}
    if delay_url is None:
        for name in of_delay:
            raise ConfigurationError(
                f"delay_{name} is of a delay service, and the broker's URL names none: add ?delay=http://HOST:7799 to "
                "it, or leave the option out"
            )
        return _open(url, of_target)
    return DelayedBroker(_open(url, of_target), _open(delay_url, of_delay))


def connect_timing(url: str, **options: object) -> TimingStore:
    """Returns the timing store for this URL, e.g. `redis://127.0.0.1:6379/?name=shop`. Does no I/O yet.

    Raises ConfigurationError for a URL whose scheme has no adapter installed.
    """
    scheme = _scheme(url)
    load = _adapter(TIMING_ENTRY_POINT_GROUP, scheme)
    if load is None:
        known_schemes = _known(TIMING_ENTRY_POINT_GROUP)
        raise ConfigurationError(f"no timing store for the URL {_shown(url)}; known schemes: {known_schemes}")
    store: TimingStore = load(url, **options)
    return store


def _without_delay(url: str) -> tuple[str, str | None]:
    """Returns the URL without its `delay` option, and the value of that option."""
    address, question, query = url.partition("?")
    options = query.split("&") if question else []
    delays = [unquote(option.partition("=")[2]) for option in options if option.partition("=")[0] == "delay"]
    if not delays:
        return url, None
    other_options = "&".join(option for option in options if option.partition("=")[0] != "delay")
    return f"{address}?{other_options}" if other_options else address, delays[-1]


def _open(url: str, options: Mapping[str, object]) -> Broker:
    adapter = _adapter(ENTRY_POINT_GROUP, _scheme(url))
    if adapter is None:
        raise ConfigurationError(
            f"no broker adapter for the URL {_shown(url)}; known schemes: {_known(ENTRY_POINT_GROUP)}; "
            "a broker's URL looks like http://127.0.0.1:7788"
        )
    broker: Broker = adapter(url, **options)
    return broker


def _adapter(group: str, scheme: str) -> Callable[..., Any] | None:
    """Returns what the first entry point of this name loads; None without one."""
    candidates = entry_points(group=group, name=scheme) if scheme else ()
    for entry_point in candidates:
        try:
            loaded: Callable[..., Any] = entry_point.load()
        except ModuleNotFoundError as error:
            brought = "".join(
                f", which comes with the extra {extra!r}: {install_hint(extra)}" for extra in entry_point.extras
            )
            raise ConfigurationError(f"the {scheme} adapter needs the package {error.name!r}{brought}") from error
        return loaded
    return None


def _known(group: str) -> str:
    return ", ".join(sorted({entry_point.name for entry_point in entry_points(group=group)})) or "none"


def _scheme(url: str) -> str:
    """Returns the URL's scheme; reports an invalid port now, and not at the first request."""
    try:
        parts = split_url(url)
        if "," not in parts.netloc:  # the URL of a cluster names several hosts, each with a port
            _ = parts.port
    except ValueError as error:
        raise ConfigurationError(
            "not a broker's URL: its address or its port cannot be read; use one like http://127.0.0.1:7788"
        ) from error
    return parts.scheme


def _shown(url: str) -> str:
    return repr(shown_url(url) if split_url(url).scheme else url)
