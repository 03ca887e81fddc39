"""The report page, its charts, and metrics for Prometheus."""
