"""What of a document's KV cache stays, as one page to look at.

A model, a document's ids and scorers come in; `collect` rates the document once and plans a compaction at every kept
fraction of a slider, and `render` turns that `View` into one HTML file that asks nothing of a network. Imports `cache`,
`compaction`, `scoring`, `checks`.
"""

from .collect import FRACTIONS, Answered, MethodView, View, collect, followed, recorded, view_of
from .page import Page, render

__all__ = [
    "FRACTIONS",
    "Answered",
    "MethodView",
    "Page",
    "View",
    "collect",
    "followed",
    "recorded",
    "render",
    "view_of",
]
