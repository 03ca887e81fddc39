"""What runs leave: totals, tables of verdicts, latencies, and how these are stored by window."""
