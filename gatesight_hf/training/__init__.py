"""Training an estimator: utilities of KV entries as targets, a model's own signals as inputs.

A model and texts come in, as `gatesight train` is given them; shards of collected data, and an estimator's folder with
its metrics and card, go out. `run` is the whole, `collect` and `fit` are its steps. Imports `cache` and `methods`, and
what is below them.
"""
