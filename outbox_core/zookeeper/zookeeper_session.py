"""One session with ZooKeeper, by kazoo. It never becomes another session: when it ends, everything fails from then on.

Reads are cached, and renewed when ZooKeeper reports a change; a connection that was lost invalidates all of them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kazoo import exceptions as kazoo_errors
from kazoo.client import KazooClient, KazooState
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.loggingsupport import BLATHER
from kazoo.retry import KazooRetry
from kazoo.security import ACL, make_acl

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.zookeeper.znode_cache import ZnodeCache, children_key
from outbox_core.zookeeper.zookeeper_errors import CoordinatorUnavailable, SessionEnded
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress, ZooKeeperSecurity

logger: EventLogger = EventLogger(__name__)
Value = TypeVar("Value")

_GRANTED: Final = re.compile(r"negotiated session timeout")
_GRANTED_ARGUMENT: Final = 2
_GAVE_UP: Final = "Failed connecting"
"""What kazoo reports at the end of a client that never connected, whatever the cause."""
_LOGIN_REFUSED: Final = "AUTH_FAILED"
_LOGIN: Final = "does not accept the login: check zookeeper_user and zookeeper_password_file"
_CERTIFICATE: Final = "demands a certificate that it trusts: set zookeeper_certificate and zookeeper_key"
_REFUSALS: Final = (
    # A server that ends in the middle of a login looks like one that refuses it.
    (_LOGIN_REFUSED, _LOGIN),
    ("CERTIFICATE_VERIFY_FAILED", "has a certificate that is not trusted: name its CA in zookeeper_ca_file"),
    *((alert, _CERTIFICATE) for alert in ("ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE", "ALERT_UNKNOWN_CA")),
)
"""What a client reports, and the mistake in its settings. No retry helps."""


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

        Raises CoordinatorUnavailable if no server answers, ConfigurationError if one does not accept this client.
        """
        self._options = options
        self._changed = changed or _ignore
        self._cache = ZnodeCache()
        self._grants = _GrantedTimeouts()
        self._ended = threading.Event()
        self._client = zookeeper_client(address, options, self._grants.logger)
        self._client.add_listener(self._listen)
        self.id = ""
        self._credentials = (0, b"")
        try:
            self._client.start(timeout=options.request_ms_max / 1000)
        except (KazooTimeoutError, kazoo_errors.KazooException) as error:
            problem = self._grants.last_problem or str(error)
            self.close()
            raise _refused(address, problem, options.security) from error
        known = self._client.client_id
        if known is None:  # the connection was lost just now
            self.close()
            raise CoordinatorUnavailable(f"the connection to ZooKeeper at {address.hosts} was lost")
        self._credentials = known
        self.id = _session_id(known[0])
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
        return self._credentials

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

    def create_ephemerals(self, paths: Sequence[str], data: bytes) -> set[str]:
        """Create ephemeral znodes of this session, all requests at once; returns the paths that did not exist.

        Raises SessionEnded if one did not become this session's.
        """
        requests = {path: self._begin(self._client.create_async, path, data, ephemeral=True) for path in paths}
        created = set()
        try:
            for path, request in requests.items():
                with suppress(kazoo_errors.NodeExistsError):
                    self._wait(request)
                    created.add(path)
        finally:
            self._cache.forget(*paths, *{path.rpartition("/")[0] for path in paths})
        self._check_own(sorted(created))
        return created

    def write(self, path: str, data: bytes, *, version: int = -1) -> Znode | None:
        """Change a znode, if it has this version; returns it, or None if it has another one or does not exist."""
        try:
            return _znode(data, self._call(self._client.set_async, path, data, version=version))
        except (kazoo_errors.BadVersionError, kazoo_errors.NoNodeError):
            return None
        finally:
            self._cache.forget(path)

    def replace(self, path: str, data: bytes, *, version: int) -> bool:
        """Delete a znode of any session, if it has this version, and create an ephemeral one of this session in its
        place, in one transaction; returns whether that was done.
        """
        transaction = self._client.transaction()
        transaction.delete(path, version=version)
        transaction.create(path, data, ephemeral=True)
        try:
            results = self._call(transaction.commit_async)
        finally:
            self._cache.forget(path, path.rpartition("/")[0])
        if any(isinstance(result, Exception) for result in results):
            return False
        self._check_own([path])
        return True

    def delete(self, path: str, *, version: int = -1) -> None:
        """Delete a znode, if it has this version; idempotent."""
        try:
            self._call(self._client.delete_async, path, version=version)
        except (kazoo_errors.BadVersionError, kazoo_errors.NoNodeError):
            return
        finally:
            self._cache.forget(path, path.rpartition("/")[0])

    def read(self, path: str) -> Znode | None:
        """Returns a znode, from the cache if it has not changed; None if there is none."""
        return self.read_all([path])[0]

    def read_all(self, paths: Sequence[str]) -> list[Znode | None]:
        """Read several znodes, all requests at once."""
        # The answers are returned, and not what the cache has by then: a change that is reported meanwhile empties it.
        znodes: dict[str, Znode | None] = {path: hit.value for path in paths if (hit := self._cache.get(path))}
        began = {path: self._cache.begin() for path in paths if path not in znodes}
        requests = {path: self._begin(self._client.get_async, path, watch=self._watch) for path in began}
        for path, request in requests.items():
            try:
                data, stat = self._wait(request)
            except kazoo_errors.NoNodeError:
                znodes[path] = None  # no watch was set
            else:
                znodes[path] = _znode(data, stat)
                self._cache.put(path, znodes[path], began=began[path])
        return [znodes[path] for path in paths]

    def children(self, path: str) -> list[str]:
        """Returns the names of a znode's children, sorted, from the cache if they have not changed."""
        key = children_key(path)
        if (hit := self._cache.get(key)) is not None:
            return list(hit.value)
        began = self._cache.begin()
        try:
            names = self._call(self._client.get_children_async, path, watch=self._watch_children)
        except kazoo_errors.NoNodeError as error:
            raise ConfigurationError(f"nothing is set up at this path: the znode {path} is missing") from error
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

    def _check_own(self, paths: Sequence[str]) -> None:
        """Raise SessionEnded unless these znodes are this session's: the client begins a new session by itself."""
        if any(znode is None or znode.session != self.id for znode in self.read_all(paths)):
            self._end()
            raise SessionEnded("the session with ZooKeeper ended")

    # -- requests ----------------------------------------------------------------------------------------------------

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._wait(self._begin(method, *arguments, **options))

    def _begin(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._ended.is_set():
            raise self._end_error()
        return method(*arguments, **options)

    def _wait(self, request: Any) -> Any:
        try:
            result = request.get(timeout=self._options.request_ms_max / 1000)
        except (kazoo_errors.NodeExistsError, kazoo_errors.NoNodeError, kazoo_errors.BadVersionError):
            if self._ended.is_set():
                raise self._end_error() from None
            raise
        except (KazooTimeoutError, kazoo_errors.KazooException) as error:
            raise (self._end_error() if self._ended.is_set() else _translated(error)) from error
        if self._ended.is_set():  # it may be the answer to another session
            raise SessionEnded("the session with ZooKeeper ended")
        return result

    def _end_error(self) -> Exception:
        """Why nothing goes on: a server accepts a session before it refuses its login."""
        if _LOGIN_REFUSED in self._grants.last_problem:
            return ConfigurationError(f"ZooKeeper {_LOGIN}")
        return SessionEnded("the session with ZooKeeper ended")

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
    """Finds in kazoo's log the session time-out that a server granted and the last problem with a connection, since
    kazoo reports them nowhere else (#769).

    Warnings and errors, one at each attempt to connect, go on to our own log for debugging; all other records end here,
    since one has the session's password.
    """

    def __init__(self) -> None:
        super().__init__(level=BLATHER)
        self.last_ms: int | None = None
        self.last_problem = ""
        self.logger = logging.Logger("kazoo", level=BLATHER)  # noqa: LOG001  (not in the tree of loggers)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and _GRANTED.search(str(record.msg)):
            self.last_ms = int(str(record.args[_GRANTED_ARGUMENT]))
        elif record.levelno >= logging.WARNING:
            text = record.getMessage()
            if not text.startswith(_GAVE_UP):
                self.last_problem = text
            logger.log(logging.DEBUG, "zookeeper_client", extra={"text": text})


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


def _refused(address: ZooKeeperAddress, problem: str, security: ZooKeeperSecurity) -> Exception:
    """The error of a client to which no server gave a session; `problem`: what it reported last."""
    for sign, mistake in _REFUSALS:
        if sign in problem:
            return ConfigurationError(f"ZooKeeper at {address.hosts} {mistake} ({problem})")
    # A server that starts or ends drops connections as one does that expects TLS, or none.
    if security.tls:
        hint = "; if its port has no TLS, name that of its secureClientPort"
    else:
        hint = "; if its port is one of TLS, set zookeeper_tls"
    return CoordinatorUnavailable(f"no ZooKeeper server of {address.hosts} accepts a session: {problem}{hint}")


def _translated(error: Exception) -> Exception:
    match error:
        case kazoo_errors.SessionExpiredError() | kazoo_errors.ConnectionClosedError():
            return SessionEnded("the session with ZooKeeper ended")
        case kazoo_errors.AuthFailedError():
            return ConfigurationError(f"ZooKeeper {_LOGIN}")
        case kazoo_errors.NoAuthError() | kazoo_errors.InvalidACLError():
            return ConfigurationError("ZooKeeper does not allow this user: set zookeeper_user and its password file")
        case _:
            text = str(error) or type(error).__name__
            return CoordinatorUnavailable(f"ZooKeeper did not confirm a request: {text}")


def _znode(data: bytes, stat: Any) -> Znode:
    session = _session_id(stat.ephemeralOwner) if stat.ephemeralOwner else ""
    return Znode(data, stat.version, stat.czxid, stat.mtime, session)


def _session_id(client_id: int) -> str:
    return f"{client_id & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _ignore() -> None:
    pass
