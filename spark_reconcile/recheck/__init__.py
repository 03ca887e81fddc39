"""The recheck: reads the records of suspects once more after a pause, and classifies them again."""
