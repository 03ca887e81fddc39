"""Admission control before a claim: circuit breakers and rate limits."""
