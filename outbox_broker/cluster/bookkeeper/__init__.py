"""Apache BookKeeper and ZooKeeper behind the ports of segments on ledgers."""
