"""The work on one source: find tables with due rows; claim, send and settle batches."""
