"""Assigns sources to compensators: all of them, or those whose leases in a database it holds. Sends nothing."""

from compensator.assignment.assignment_factory import open_assignment
from compensator.assignment.lease_options import LeaseOptions
from compensator.assignment.leased_assignment import LeasedAssignment
from compensator.assignment.port import Assignment, UnleasedAssignment

__all__ = ["Assignment", "LeaseOptions", "LeasedAssignment", "UnleasedAssignment", "open_assignment"]
