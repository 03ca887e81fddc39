"""The jars of BookKeeper's Java client, of bookies and of ZooKeeper, in the folder jars."""
