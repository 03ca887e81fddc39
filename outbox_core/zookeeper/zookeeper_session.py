"""One session with ZooKeeper, by kazoo. It never becomes another session: when it ends, everything fails from then on.

Reads are cached, and renewed when ZooKeeper reports a change; a connection that was lost invalidates all of them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kazoo import exceptions as kazoo_errors
from kazoo.client import KazooClient, KazooState
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.loggingsupport import BLATHER
from kazoo.retry import KazooRetry
from kazoo.security import ACL, make_acl

from outbox_broker.cluster.cluster_errors import CoordinatorUnavailable, SessionEnded
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.zookeeper.znode_cache import ReadCache, children_key
from outbox_core.zookeeper.zookeeper_address import ZooKeeperAddress, ZooKeeperSecurity

logger: EventLogger = EventLogger(__name__)
Value = TypeVar("Value")

_GRANTED: Final = re.compile(r"negotiated session timeout")
_GRANTED_ARGUMENT: Final = 2
_CLOSE_SECONDS_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class Znode:
    """A znode's data, its version for a compare-and-set, its epoch (the zxid of its creation) and its last date."""

    data: bytes
    version: int
    epoch: int
    dated_ms: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """`session_ms`: the time-out to ask for, which the server may change. `request_ms_max`: the wait for an answer."""

    session_ms: int = 5_000
    request_ms_max: int = 5_000
    security: ZooKeeperSecurity = field(default_factory=ZooKeeperSecurity)


class ZooKeeperSession:
    """Thread-safe. Errors: CoordinatorUnavailable (a write may have happened), SessionEnded, ConfigurationError."""

    def __init__(
        self, address: ZooKeeperAddress, *, options: SessionOptions, changed: Callable[[], None] | None = None
    ) -> None:
        """Connect. `changed` is called, from any thread, when a cached read is no longer current or the session ends.

        Raises CoordinatorUnavailable if no server answers.
        """
        self._options = options
        self._changed = changed or _ignore
        self._cache = ReadCache()
        self._grants = _GrantedTimeouts()
        self._ended = threading.Event()
        self._client = zookeeper_client(address, options, self._grants.logger)
        self._client.add_listener(self._listen)
        self.id = ""
        try:
            self._client.start(timeout=options.request_ms_max / 1000)
        except (KazooTimeoutError, kazoo_errors.KazooException) as error:
            self.close()
            raise CoordinatorUnavailable(
                f"no ZooKeeper server of {address.hosts} accepts a session: {error}"
            ) from error
        self.id = _session_id(self._client.client_id[0])
        if self._grants.last_ms is None:
            self.close()
            raise ConfigurationError("this version of kazoo does not report the session time-out: install 2.11.0")

    @property
    def timeout_ms(self) -> int:
        """The session time-out that the server granted last."""
        return self._grants.last_ms or 0

    @property
    def is_ended(self) -> bool:
        """Whether the session is over, as far as this process knows."""
        return self._ended.is_set()

    @property
    def credentials(self) -> tuple[int, bytes]:
        """The session's number and password, with which another client can continue or end it."""
        number, password = self._client.client_id
        return number, password

    def create(self, path: str, data: bytes, *, ephemeral: bool = False) -> Znode | None:
        """Create a znode; returns it, or None if there is one already, maybe this session's own.

        Raises SessionEnded if an ephemeral znode did not become this session's.
        """
        try:
            _, stat = self._call(
                self._client.create_async, path, data, ephemeral=ephemeral, makepath=not ephemeral, include_data=True
            )
        except kazoo_errors.NodeExistsError:
            return None
        finally:
            self._cache.forget(path, path.rpartition("/")[0])
        znode = _znode(data, stat)
        if ephemeral and znode.session != self.id:  # the client had begun a new session by itself
            self._end()
            raise SessionEnded("the session with ZooKeeper ended")
        return znode

    def write(self, path: str, data: bytes, *, version: int = -1) -> Znode | None:
        """Change a znode, if it has this version; returns it, or None if it has another one or does not exist."""
        try:
            return _znode(data, self._call(self._client.set_async, path, data, version=version))
        except (kazoo_errors.BadVersionError, kazoo_errors.NoNodeError):
            return None
        finally:
            self._cache.forget(path)

    def delete(self, path: str) -> None:
        """Delete a znode; idempotent."""
        try:
            self._call(self._client.delete_async, path)
        except kazoo_errors.NoNodeError:
            return
        finally:
            self._cache.forget(path, path.rpartition("/")[0])

    def read(self, path: str) -> Znode | None:
        """Returns a znode, from the cache if it has not changed; None if there is none."""
        return self.read_all([path])[0]

    def read_all(self, paths: Sequence[str]) -> list[Znode | None]:
        """Read several znodes, all requests at once."""
        # The answers are returned, and not what the cache has by then: a change that is reported meanwhile empties it.
        found: dict[str, Znode | None] = {path: hit.value for path in paths if (hit := self._cache.get(path))}
        began = {path: self._cache.begin() for path in paths if path not in found}
        requests = {path: self._begin(self._client.get_async, path, watch=self._watch) for path in began}
        for path, request in requests.items():
            try:
                data, stat = self._wait(request)
            except kazoo_errors.NoNodeError:
                found[path] = None  # no watch was set
            else:
                found[path] = _znode(data, stat)
                self._cache.put(path, found[path], began=began[path])
        return [found[path] for path in paths]

    def children(self, path: str) -> list[str]:
        """Returns the names of a znode's children, sorted, from the cache if they have not changed."""
        key = children_key(path)
        if (hit := self._cache.get(key)) is not None:
            return list(hit.value)
        began = self._cache.begin()
        try:
            names = self._call(self._client.get_children_async, path, watch=self._watch_children)
        except kazoo_errors.NoNodeError as error:
            raise ConfigurationError(f"there is no cluster here: the znode {path} is missing") from error
        self._cache.put(key, tuple(sorted(names)), began=began)
        return sorted(names)

    def close(self) -> None:
        """End the session, and with it its ephemeral znodes. Idempotent."""
        self._ended.set()
        try:
            self._client.stop()
            self._client.close()
        except (KazooTimeoutError, kazoo_errors.KazooException) as error:
            logger.warning("zookeeper_close_failed", extra={"error": str(error)})

    # -- requests ----------------------------------------------------------------------------------------------------

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._wait(self._begin(method, *arguments, **options))

    def _begin(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._ended.is_set():
            raise SessionEnded("the session with ZooKeeper ended")
        return method(*arguments, **options)

    def _wait(self, request: Any) -> Any:
        try:
            result = request.get(timeout=self._options.request_ms_max / 1000)
        except (kazoo_errors.NodeExistsError, kazoo_errors.NoNodeError, kazoo_errors.BadVersionError):
            if self._ended.is_set():
                raise SessionEnded("the session with ZooKeeper ended") from None
            raise
        except (KazooTimeoutError, kazoo_errors.KazooException) as error:
            raise _translated(error) from error
        if self._ended.is_set():  # it may be the answer to another session
            raise SessionEnded("the session with ZooKeeper ended")
        return result

    # -- what kazoo reports, in threads of its own --------------------------------------------------------------------

    def _listen(self, state: str) -> None:
        if state == KazooState.LOST:
            self._end()
        self._cache.forget_all()
        self._changed()

    def _end(self) -> None:
        self._ended.set()

    def _watch(self, event: Any) -> None:
        self._forget_changed(event, event.path)

    def _watch_children(self, event: Any) -> None:
        self._forget_changed(event, None if event.path is None else children_key(event.path))

    def _forget_changed(self, event: Any, key: str | None) -> None:
        if event.type == "NONE" or key is None:
            self._cache.forget_all()
        else:
            self._cache.forget(key)
        self._changed()


class _GrantedTimeouts(logging.Handler):
    """Finds the session time-out that a server granted in kazoo's log, which is where kazoo reports it (#769).

    Warnings and errors, one at each attempt to connect, go on to our own log for debugging; all other records end here,
    since one has the session's password.
    """

    def __init__(self) -> None:
        super().__init__(level=BLATHER)
        self.last_ms: int | None = None
        self.logger = logging.Logger("kazoo", level=BLATHER)  # noqa: LOG001  (not in the tree of loggers)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and _GRANTED.search(str(record.msg)):
            self.last_ms = int(str(record.args[_GRANTED_ARGUMENT]))
        elif record.levelno >= logging.WARNING:
            logger.log(logging.DEBUG, "zookeeper_client", extra={"text": record.getMessage()})


def zookeeper_client(address: ZooKeeperAddress, options: SessionOptions, log: logging.Logger) -> Any:
    """Returns a client of kazoo that is not started, and that connects again for ever."""
    security = options.security
    acl: Iterable[ACL] | None = None
    sasl: dict[str, str] | None = None
    if security.user is not None:
        acl = [make_acl("sasl", security.user, all=True)]
        sasl = {"mechanism": "DIGEST-MD5", "username": security.user, "password": security.password or ""}
    return KazooClient(
        hosts=address.hosts,
        timeout=options.session_ms / 1000,
        connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=0.5, max_jitter=0.4),
        default_acl=acl,
        sasl_options=sasl,
        use_ssl=security.tls,
        verify_certs=security.tls,
        check_hostname=security.tls,
        ca=None if security.ca_file is None else str(security.ca_file),
        certfile=None if security.certificate is None else str(security.certificate),
        keyfile=None if security.key is None else str(security.key),
        logger=log,
    )


def _translated(error: Exception) -> Exception:
    match error:
        case kazoo_errors.SessionExpiredError() | kazoo_errors.ConnectionClosedError():
            return SessionEnded("the session with ZooKeeper ended")
        case kazoo_errors.NoAuthError() | kazoo_errors.AuthFailedError() | kazoo_errors.InvalidACLError():
            return ConfigurationError("ZooKeeper does not allow this user: give --zookeeper-user and its password file")
        case _:
            text = str(error) or type(error).__name__
            return CoordinatorUnavailable(f"ZooKeeper did not confirm a request: {text}")


def _znode(data: bytes, stat: Any) -> Znode:
    session = _session_id(stat.ephemeralOwner) if stat.ephemeralOwner else ""
    return Znode(data, stat.version, stat.czxid, stat.mtime, session)


def _session_id(number: int) -> str:
    return f"{number & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _ignore() -> None:
    pass
