"""The library's own errors. Each is also a built-in error, so that callers need not know them."""


class UnsupportedModelError(ValueError):
    """The model is no hybrid that GateSight can read."""


class EstimatorMismatchError(ValueError):
    """The estimator was trained for another layout of GDN and attention layers."""


class CacheStateError(RuntimeError):
    """A call that does not fit where the cache is in its life: prefill, compacted, served."""


class SessionFileError(ValueError):
    """A file of a saved session is not what its format says: damaged, cut off, changed, or of another version."""


class SessionMismatchError(SessionFileError):
    """A saved session belongs to another model, tokenizer or estimator than the one given."""
