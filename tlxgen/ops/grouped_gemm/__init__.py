"""One matrix product for each expert of a mixture, in one launch: problem, operator, time model, torch reference."""
