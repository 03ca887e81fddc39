"""The report: one HTML file without JavaScript, from numbers alone. It reads no source."""
