"""Messages, and the ports that brokers implement."""
