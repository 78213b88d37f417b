"""The regression gate on files of tuned configs: `tlxgen regress`.

- `findings`: rows, findings and outcomes.
- `rows`: reads the files, and checks each row without a GPU: key, config, code, compiler, simulator.
- `ratchet`: compares the rows with stored facts of their binaries, ratios to the library, and shapes that need a row.
- `retime`: checks results and times the rows on the GPU that they were measured on.
- `report`: the outcomes as JUnit, Markdown and JSON.
"""
