"""Results of runs: totals, tables of verdicts, latencies, and their storage by window."""
