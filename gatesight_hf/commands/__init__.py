"""What a person types: `gatesight demo | ask | train | analyze | evaluate | report | inspect | push | serve`.

Arguments come in; tables, and with `--json` one JSON object, go out. Imports all of the library, each part when a
command needs it.
"""
