"""Which sources a compensator serves: all of them, or those that it holds by leases in a database. It sends nothing."""

from compensator.assignment.leased_assignment import LeasedAssignment, LeaseOptions
from compensator.assignment.opening import open_assignment
from compensator.assignment.port import AlwaysMine, Assignment, SourceName

__all__ = ["AlwaysMine", "Assignment", "LeaseOptions", "LeasedAssignment", "SourceName", "open_assignment"]
