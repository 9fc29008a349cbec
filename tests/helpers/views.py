"""Views without a model, and what a page holds."""

import base64
import json
import re
import zlib
from typing import Any

import torch

from gatesight_hf.view import FRACTIONS, Answered, MethodView, View

#: A text that would be markup, end a script, or break a line of one, wherever it were not text.
HOSTILE = (
    "</script><img src=x onerror=\"document.title='broken';alert(1)\">",
    "<script>alert(2)</script>",
    "{{ script }}",
    "&lt;b&gt;",
    "\u2028\u2029",
    "]]>--><!--",
    "javascript:alert(3)",
    "\ud800",
    "\u202eright to left",
    "'\"`${alert(4)}",
)


def synthetic(tokens: list[str], layers: int = 2, heads: int = 2, names: tuple[str, ...] = ("one", "two")) -> View:
    """Methods with random scores, whose heads all keep the same number of entries."""
    length, generator = len(tokens), torch.Generator().manual_seed(0)
    sizes = torch.tensor([round(p * length) for p in FRACTIONS], dtype=torch.int32)
    methods = []
    for name in names:
        ranks = torch.rand(layers, heads, length, generator=generator).argsort(-1).argsort(-1).int()
        levels = torch.searchsorted(sizes.unique(), ranks, right=True).to(torch.uint8)
        percentiles = ((length - 1 - ranks) * 100 // max(1, length - 1)).to(torch.uint8)
        kept = sizes[:, None, None].expand(-1, layers, heads).contiguous()
        methods.append(MethodView(name, "flat", levels, percentiles, kept, list(FRACTIONS)))
    return View(tuple(tokens), tuple(range(3, 4 * layers, 4)), tuple(methods))


def hostile() -> View:
    """A view with `HOSTILE` texts wherever there is one."""
    plain = synthetic([*HOSTILE, *"a b c".split()] * 3, names=HOSTILE[:2])
    answered = tuple(Answered(text, {text: text, "kept": text}) for text in HOSTILE)
    return View(plain.tokens, plain.layers, plain.methods, 1, 2, HOSTILE[0], HOSTILE[1], answered, 0.2)


def held(page: str) -> dict[str, Any]:
    """What a page says it is about, read back; arrays of methods as bytes."""
    (packed,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(packed)

    def unpacked(text: str) -> bytes:
        return zlib.decompress(base64.b64decode(text))

    arrays = [{name: unpacked(text) for name, text in method.items()} for method in data["methods"]]
    return {"about": json.loads(unpacked(data["about"])), "arrays": arrays}
