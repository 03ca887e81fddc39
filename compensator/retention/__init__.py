"""Deletes archive and inbox rows, and order heads, that are past their retention."""
