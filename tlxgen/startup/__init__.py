"""What makes a new process start fast: notes of earlier processes, and imports without what they do in vain."""
