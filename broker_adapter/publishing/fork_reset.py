"""Resets objects that own threads or connections in a forked child, which has neither."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Protocol


class ForkAware(Protocol):
    """The owner of what a forked child must leave to its parent."""

    def reset_after_fork(self) -> None:
        """Forget what is the parent's, in the child: neither use nor free it."""


def reset_in_children(owner: ForkAware) -> None:
    """Reset the owner in each child that is forked from now on, as long as it lives."""
    os.register_at_fork(after_in_child=partial(_reset, weakref.ref(owner)))


def _reset(owner: weakref.ref[ForkAware]) -> None:
    alive = owner()
    if alive is not None:
        alive.reset_after_fork()
