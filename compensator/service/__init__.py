"""The service: workers that run turns of sources, periodic work, health and metrics."""
