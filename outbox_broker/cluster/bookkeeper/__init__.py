"""Apache BookKeeper and ZooKeeper behind the ports of the segment store on ledgers."""
