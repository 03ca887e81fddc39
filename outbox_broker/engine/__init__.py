"""The engine: publish, pull, settle, dispatch of due messages, retention, group operations."""
