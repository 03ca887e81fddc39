"""The schedule: stores messages up to two years ahead and dispatches them when they are due."""
