"""The broker's files: segments, frames and records."""
