"""Assigns sources to compensators: all, or those whose leases in a database or in ZooKeeper it holds. Sends nothing."""

from compensator.assignment.assignment_factory import open_assignment, open_zookeeper_assignment
from compensator.assignment.instance_registry_port import LeaseOptions
from compensator.assignment.source_assignment import Assignment, LeasedAssignment, UnleasedAssignment

__all__ = [
    "Assignment",
    "LeaseOptions",
    "LeasedAssignment",
    "UnleasedAssignment",
    "open_assignment",
    "open_zookeeper_assignment",
]
