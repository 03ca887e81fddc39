"""From a data folder to the state in memory, when a broker opens."""
