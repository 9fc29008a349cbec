"""Benchmarks in one form: contexts with questions on them (`items`), and their token ids (`prompting`).

Seeds or data sets come in; items go out. A suite is a module here (`toy`) or a package (`ruler`, `scbench`), and
`arguments` makes its items of what `gatesight evaluate` is given. Imports no other room.
"""
