"""Sessions with ZooKeeper, by kazoo, which the extra `zookeeper` brings."""
