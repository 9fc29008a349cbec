"""Budgets and selection: what stays.

Scores, lengths, output gates and options come in; a `Plan` goes out, the slots that every layer and head keeps.
`budget` and `selection` are functions of numbers and tensors. Imports `scoring` and `entries`.
"""

from .budget import ALLOCATIONS, allocate, total_budget
from .plan import CompactionOptions, LayerPlan, Plan, plan_compaction
from .selection import Protected, select, select_global

__all__ = [
    "ALLOCATIONS",
    "CompactionOptions",
    "LayerPlan",
    "Plan",
    "Protected",
    "allocate",
    "plan_compaction",
    "select",
    "select_global",
    "total_budget",
]
