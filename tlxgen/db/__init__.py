"""The database of tuned configs: rows, the SQLite file, the rows that come with tlxgen, and which row serves a problem."""
