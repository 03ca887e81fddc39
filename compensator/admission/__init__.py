"""Whether rows may be claimed now: circuit breakers and rate limits."""
