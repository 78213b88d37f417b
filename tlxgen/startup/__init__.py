"""Fast start of a process: notes of earlier processes, and imports without needless work."""
