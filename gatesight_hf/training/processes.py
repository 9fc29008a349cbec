"""The processes of one run, as `accelerate launch` and `torchrun` start them; one alone is a run too."""

from datetime import timedelta

import torch
from accelerate import PartialState

#: A process waits for the slowest as long as that takes; the launcher ends all when one fails.
PATIENCE = timedelta(days=30)


def all_processes() -> PartialState:
    """This process among those of the run: its index, their number, its device, and a barrier."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
