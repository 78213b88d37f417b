"""The tuner: search, compile, gate, time, choose the winner, store it."""
