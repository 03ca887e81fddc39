"""The jars of BookKeeper's Java client, in the folder jars."""
