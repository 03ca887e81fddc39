"""The main job, end to end, on real input: booked trips, killed processes, and the proof that nothing was lost."""
