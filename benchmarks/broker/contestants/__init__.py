"""One module for each broker: its fast Python client. The measurements are elsewhere."""
