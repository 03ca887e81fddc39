"""A demo from end to end on real data: booked trips, killed processes, and the proof that nothing was lost."""
