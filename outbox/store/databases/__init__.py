"""What each database does differently, one file a database. Begin at port.py, which asks the questions."""
