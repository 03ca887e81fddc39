"""The rules that give verdicts, as data, and the expressions that they are made of."""
