"""What can be seen in a model and its estimator, apart from answers: which signals tell of future utility, and when.

Documents and an estimator come in; figures with the paper's beside them go out. `ages` and `one_shot` are commands:
`python -m gatesight_eval.observations.ages`. Imports `suites`, `metrics`, `reports`.
"""
