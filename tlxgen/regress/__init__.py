"""The regression gate on files of tuned configs: `tlxgen regress`.

To be read in this order:

- `findings` are what it says: rows, what is wrong with each, and what to do.
- `rows` reads the files and checks each row as far as that goes without a GPU: key, config, code, compiler, simulator.
- `ratchet` holds the rows against what was true before: the facts of their binaries, and which shapes have a row.
- `retime` puts the rows on the card that they were measured on: results, and the ratio to the library.
- `report` says it to people, to CI servers (JUnit) and in a pull request (Markdown).
"""
