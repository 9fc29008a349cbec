"""From a `View` to one HTML page, in which no text of a document can be markup."""

import base64
import hashlib
import html
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatesight_kernels.checks import described

from ..files.tensor_files import replacing
from .collect import FRACTIONS, MethodView, View

#: Of the frame in a notebook.
_FRAME = "width: 100%; height: 48rem; border: 1px solid #8888"
_ASSETS = Path(__file__).parent
_PLACE = re.compile(r"\{\{ (\w+) \}\}")


@dataclass(frozen=True)
class Page:
    """A view as a page, which a notebook shows in a frame.

    Attributes:
        view: What it shows.
    """

    view: View

    @property
    def html(self) -> str:
        """All of it, see `render`."""
        return render(self.view)

    def save(self, path: str | Path) -> None:
        """Write it into a file, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        with replacing(path) as file:
            file.write(self.html.encode())

    def _repr_html_(self) -> str:
        return f'<iframe sandbox="allow-scripts" style="{_FRAME}" srcdoc="{html.escape(self.html)}"></iframe>'


def render(view: View) -> str:
    """The page, whole: styles, script and data are in it, and its policy lets it load nothing else.

    Texts and numbers are packed as deflated bytes in base64, whose alphabet has no markup; the script puts texts on the
    page as text nodes only.

    Raises:
        TypeError: It is no view.
    """
    if not isinstance(view, View):
        raise TypeError(f"view must be a View, as collect() gives it, got {described(view)}.")
    css, script, page = (_asset(f"page.{kind}") for kind in ("css", "js", "html"))
    policy = f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(script)}; base-uri 'none'"
    parts = {"policy": f"{policy}; form-action 'none'", "css": css, "script": script, "data": _data(view)}
    # One pass: what stands in a part is never looked at again.
    return _PLACE.sub(lambda place: parts[place[1]], page)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """What a content security policy calls an inline text by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(view: View) -> str:
    """A JSON object of base64 texts: `about`, a JSON object, and by method its arrays."""
    about = {
        "title": view.title,
        "model": view.model,
        "tokens": view.tokens,
        "layers": view.layers,
        "heads": view.methods[0].levels.shape[1],
        "prefix": view.protected_prefix,
        "suffix": view.protected_suffix,
        "fractions": FRACTIONS,
        "methods": [{"name": m.name, "allocation": m.allocation, "achieved": m.achieved} for m in view.methods],
        "answered": [
            {"question": one.question, "answers": [[name, text] for name, text in one.answers.items()]}
            for one in view.answered
        ],
        "answeredAt": view.answered_at,
    }
    packed = {"about": _packed(json.dumps(about).encode()), "methods": [_arrays(method) for method in view.methods]}
    return json.dumps(packed)


def _arrays(method: MethodView) -> dict[str, Any]:
    """Bytes `[L, H, T]`, and little-endian 32-bit numbers `[fractions, L, H]`."""
    return {
        "levels": _packed(method.levels.contiguous().numpy().tobytes()),
        "percentiles": _packed(method.percentiles.contiguous().numpy().tobytes()),
        "kept": _packed(method.kept.contiguous().numpy().astype("<i4").tobytes()),
    }


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()
