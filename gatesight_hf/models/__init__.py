"""How a hybrid model is read and listened to: layouts, families, hooks.

A model comes in; its layout (`HybridSpec`) goes out, and in every forward the GDN signals and views of attention
layers, to the cache of the call (`SignalSink`). A new family is one class in `families.py`. Imports `entries`, and
`reference` for the name of the bundled model.
"""

from .families import FamilyAdapter, adapter_for
from .hooks import SignalHooks, attach
from .hybrid import HybridModules, HybridSpec, find_modules
from .loading import load_config, load_named
from .sink import GenerateCall, ListeningCache, SignalSink

__all__ = [
    "FamilyAdapter",
    "GenerateCall",
    "HybridModules",
    "HybridSpec",
    "ListeningCache",
    "SignalHooks",
    "SignalSink",
    "adapter_for",
    "attach",
    "find_modules",
    "load_config",
    "load_named",
]
