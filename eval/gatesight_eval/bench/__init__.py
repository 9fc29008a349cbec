"""Costs: memory and seconds of GateSight beside a full cache and other methods, side by side in one run.

Sizes of a real model come in, with random weights; tables, plots and JSON go out, and every timed output is compared
with the others'. `cost` and `decode` are commands: `python -m gatesight_eval.bench.cost`. Imports `backends` and
`reports`.
"""
