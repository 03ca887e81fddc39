"""Settings, errors, ranges of time and operations on DataFrames that all layers share."""
