"""Common parts of the benchmark programs: servers, rounds, statistics, reports."""
