"""The broker over HTTP: routes, codecs, access, limits and the server process. What a broker does is the engine's."""
