"""The broker's logs on disk: segments, shared syncs, recovery, the folder's lock. Knows frames, not messages."""
