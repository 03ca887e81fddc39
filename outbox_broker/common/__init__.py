"""Options and small values that all layers share."""
