"""From a config to a loaded binary: emitting, compiling, reading what the compiler reports, importing."""
