"""Assigns resources to the live members of a group. Pure: no database, no ZooKeeper, no clock."""
