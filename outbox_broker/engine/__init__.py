"""The engine: publish, pull, settle, dispatch of what is due, retention, operations on groups."""
