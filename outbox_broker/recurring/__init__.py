"""Recurring messages: their state, and when they occur."""
