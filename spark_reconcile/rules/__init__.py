"""The rules that give verdicts, as data, and the expressions of their conditions."""
