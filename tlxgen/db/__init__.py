"""The database of tuned configs: rows, the SQLite file, shipped rows, and the choice of the row for a problem."""
