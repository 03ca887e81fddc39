"""The commands `outbox reconcile run|watch|explain|report|repair`."""
