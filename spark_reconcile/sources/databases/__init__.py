"""How each database is read, one file a database. Begin at source_database.py, which asks the questions."""
