"""The HTTP protocol that the server and its clients share: shapes and problems."""
