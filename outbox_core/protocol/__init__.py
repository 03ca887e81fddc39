"""The HTTP protocol as its server and its clients share it: shapes and problems."""
