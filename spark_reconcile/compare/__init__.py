"""Compares digests of the sources by key and by id, so that only mismatching rows are classified one by one."""
