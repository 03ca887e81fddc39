"""Named segments with one writer: the port, and its implementations on files of a folder and on ledgers."""
