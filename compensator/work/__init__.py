"""The work on one source: which tables have due rows, claim, send, settle, batch after batch."""
