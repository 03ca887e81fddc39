"""The broker over HTTP: routes, codecs, access, limits and the server process. Broker logic is in the engine."""
