"""What the schedule costs, and how late it is."""
