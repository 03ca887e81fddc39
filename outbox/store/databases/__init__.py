"""What each database does differently, one file a database. Begin at database_port.py, which asks the questions."""
