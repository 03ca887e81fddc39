"""A socket on which all of an exchange has one deadline. A socket's own time-out begins anew with each byte."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable
from typing import Any, Final

BYTES_A_SECOND_MIN: Final = 1024 * 1024
"""A peer or a network that is slower than this is given up, where the size of what comes buys time."""
_LATE = "timed out"
"""As a socket says it itself, which waits for what is left of the time."""


class DeadlineSocket:
    """What is sent and read through it, together, is over by the deadline: behind it both raise TimeoutError, however
    steadily the other end trickles. Plain or TLS; used by one thread at a time.

    It stands where http.client expects a socket, too: settimeout() sets the deadline of all that follows, and what
    makefile() reads has it.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        deadline_s: float,
        paying_bytes_max: int = 0,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s`: by the clock `monotonic_s`. The first `paying_bytes_max` bytes that come put the deadline off,
        by a second for BYTES_A_SECOND_MIN of them; without a bound, what never ends would.
        """
        self._socket = connected
        self._monotonic_s = monotonic_s
        self._deadline_s: float | None = deadline_s
        self._paying_bytes_left = paying_bytes_max

    def settimeout(self, timeout_s: float | None) -> None:
        """All that follows, until it is called again, is to be over within this time; None: whenever it is."""
        self._deadline_s = None if timeout_s is None else self._monotonic_s() + timeout_s

    def extend(self, seconds: float) -> None:
        """Put off the deadline."""
        if self._deadline_s is not None:
            self._deadline_s += seconds

    def recv(self, size: int, /) -> bytes:
        """Some bytes; none at the end. Raises TimeoutError, OSError."""
        data = self._with_what_is_left().recv(size)
        self._pay(len(data))
        return data

    def recv_into(self, buffer: Any, /) -> int:
        """As recv(), into a buffer; returns how many bytes."""
        count = self._with_what_is_left().recv_into(buffer)
        self._pay(count)
        return count

    def sendall(self, data: Any, /) -> None:
        """Send all of it. Raises TimeoutError, OSError: part of it may have arrived."""
        self._with_what_is_left().sendall(data)  # which alone of a socket's calls has one time for all its bytes

    def makefile(self, mode: str = "rb", buffering: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
        """A file to read from. As a socket's, it keeps the connection open until it is closed itself."""
        if mode != "rb":
            raise ValueError(f"a socket with a deadline is read in the mode rb, not {mode}")
        size = buffering if buffering > 0 else io.DEFAULT_BUFFER_SIZE
        return io.BufferedReader(_DeadlineReader(self, self._socket.makefile("rb", buffering=0)), size)

    def fileno(self) -> int:
        """Of the socket: whether it can be read from is asked without a deadline."""
        return self._socket.fileno()

    def shutdown(self, how: int, /) -> None:
        """End it for both."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket, once no file reads from it."""
        self._socket.close()

    def _pay(self, count: int) -> None:
        paying = min(count, self._paying_bytes_left)
        self._paying_bytes_left -= paying
        self.extend(paying / BYTES_A_SECOND_MIN)

    def _with_what_is_left(self) -> socket.socket:
        if self._deadline_s is None:
            self._socket.settimeout(None)
            return self._socket
        left_s = self._deadline_s - self._monotonic_s()
        if left_s <= 0:  # 0 would not wait at all, and raise another error
            raise TimeoutError(_LATE)
        self._socket.settimeout(left_s)
        return self._socket


class _DeadlineReader(io.RawIOBase):
    """`counted`: the socket's own file, by which the socket knows that it is still read from."""

    def __init__(self, timed: DeadlineSocket, counted: io.RawIOBase | socket.SocketIO) -> None:
        self._timed = timed
        self._counted = counted

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        return self._timed.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            self._counted.close()
        super().close()
