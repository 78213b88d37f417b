"""Search spaces: parameters, constraints, the legal configs of a problem and their order."""
