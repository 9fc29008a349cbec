"""Options of training by one name."""

import argparse
from typing import Any

#: What the GateSight paper trains on: documents of about 1K tokens. How many it measures on it does not say.
RECIPES = {"paper": {"train_documents": 2428, "length": 1024}}


class Recipe(argparse.Action):
    """Sets options that were not given by themselves."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        for name, value in RECIPES[values].items():
            if getattr(namespace, name) == parser.get_default(name):
                setattr(namespace, name, value)
