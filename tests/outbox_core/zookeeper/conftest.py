"""One ZooKeeper for the tests of this folder."""

from __future__ import annotations

from tests.fixtures.zookeeper_server import running_zookeeper

__all__ = ["running_zookeeper"]
