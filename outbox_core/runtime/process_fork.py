"""Resets what owns threads, locks or connections in a forked child, which has none of its parent's threads.

Python's hooks tell a child that it was forked, unless it was forked in C: uWSGI, by default, calls none of them. So the
process's id is compared as well, here alone, wherever a thread, lock or connection is about to be used.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Final, Protocol
from weakref import WeakSet


class ForkAware(Protocol):
    """The owner of what a forked child must leave to its parent. Hashable by identity, and weakly referable."""

    def reset_after_fork(self) -> None:
        """Forget what is the parent's, in the child: neither use nor free it. Its locks may be held by no thread."""


@dataclass(slots=True)
class _Process:
    """The process that the owners belong to, and the locks of those that are being reset, by process."""

    id: int = field(default_factory=os.getpid)
    resetting: dict[int, threading.RLock] = field(default_factory=dict)
    is_hooked: bool = False


_process: Final = _Process()
_owners: Final[WeakSet[ForkAware]] = WeakSet()


def reset_in_children(owner: ForkAware) -> None:
    """Reset the owner in each child that is forked from now on, as long as it lives."""
    notice_fork()  # the owner is this process's already
    if not _process.is_hooked:
        _process.is_hooked = True
        os.register_at_fork(after_in_child=notice_fork)
    _owners.add(owner)


def notice_fork() -> None:
    """Reset all owners if this is a child that was forked since the last call; call it before any of them is used.

    Costs a system call. Other threads of the child wait until all is reset.
    """
    process_id = os.getpid()
    if process_id == _process.id:
        return
    # One lock a process: a parent's might be held by a thread that a child of it does not have.
    with _process.resetting.setdefault(process_id, threading.RLock()):
        if process_id != _process.id:
            for owner in list(_owners):
                owner.reset_after_fork()
            _process.id = process_id
