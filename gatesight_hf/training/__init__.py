"""Training an estimator: utilities of KV entries as targets, a model's own signals as inputs."""
