"""Delay: what is scheduled, and when it is due. No I/O yet."""
