"""The producer: publish in the transaction of a business function, send after its commit."""
