"""The library's own errors. Each is also a built-in error, so that callers need not know them."""


class UnsupportedModelError(ValueError):
    """The model is no hybrid that GateSight can read."""


class EstimatorMismatchError(ValueError):
    """The estimator was trained for another layout of GDN and attention layers."""


class CacheStateError(RuntimeError):
    """A call that does not fit where the cache is in its life: prefill, compacted, served."""
