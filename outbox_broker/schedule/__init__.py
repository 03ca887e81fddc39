"""The schedule: messages in until two years ahead, out when they are due."""
