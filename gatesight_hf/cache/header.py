"""The metadata of a saved cache's file: what they say, checked before anything else is read."""

import math
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from ..compaction.plan import CompactionOptions, Plan
from ..entries.held import Extent
from ..files.tensor_files import CHECKSUM, parse_json
from .identity import Identity

FORMAT, FORMAT_VERSION = "gatesight-cache", 3
#: Those that can be read; 2 had no `session`.
READABLE = ("2", "3")
#: Beyond every length and number of rows.
MOST = 2**31
PHASES = ("prefill", "score", "compact")


@dataclass(frozen=True)
class SavedCache:
    """What a file says of a cache besides its layers.

    Attributes:
        identity: What it belongs to.
        options: How it was compacted.
        extent: Sizes.
        plan: The compaction that was carried out.
        seconds: Wall time by phase.
        ids: `[B, context + tail]`, int64, or None.
        padding: `[B, context + tail]`, bool, False at pads, or None.
        session: What a session around the cache adds, JSON that is checked where it is used; None without one.
    """

    identity: Identity
    options: CompactionOptions
    extent: Extent
    plan: Plan
    seconds: dict[str, float]
    ids: Tensor | None
    padding: Tensor | None
    session: dict[str, Any] | None = None


def parse_header(metadata: dict[str, str]) -> tuple[SavedCache, list[Any]]:
    """What the metadata say, and the kinds of the layers.

    Raises:
        ValueError, TypeError: Not what the format says.
    """
    if metadata.get("format") != FORMAT:
        raise ValueError("a safetensors file, but not one of a saved cache or session")
    if metadata.get("format_version") not in READABLE:
        raise ValueError(
            f"format version {short(metadata.get('format_version'))}; this gatesight_hf reads {', '.join(READABLE)}: "
            "upgrade gatesight_hf, or save the session anew"
        )
    _keys("the metadata", metadata, {"format", "format_version", CHECKSUM, "cache"})
    data = _object(metadata["cache"])
    _keys("cache", data, {"model", "tokenizer", "scorer", "options", "layers", "extent", "plan", "seconds"})
    _keys("model", data["model"], {"model_type", "layout", "dtype", "configuration", "weights"})
    _keys("options", data["options"], {f.name for f in fields(CompactionOptions)})
    _keys("extent", data["extent"], {f.name for f in fields(Extent)})
    _keys("plan", data["plan"], {"achieved_fraction", "kv_bytes_before"})
    _keys("seconds", data["seconds"], set(PHASES))
    texts = [*data["model"].values(), data["scorer"], "" if data["tokenizer"] is None else data["tokenizer"]]
    if not all(isinstance(text, str) for text in texts) or not isinstance(data["layers"], list):
        raise ValueError("model, tokenizer and scorer must be texts, and layers a list")
    extent, plan, seconds = Extent(**data["extent"]), data["plan"], data["seconds"]
    least = {"rows": 1, "context": 1, "tail": 0}
    if not all(type(n) is int and least[name] <= n < MOST for name, n in asdict(extent).items()):
        raise ValueError(f"implausible sizes {short(data['extent'])}")
    if not all(_is_number(value, math.inf) for value in seconds.values()):
        raise ValueError(f"seconds must be numbers >= 0, got {short(seconds)}")
    if (
        not _is_number(plan["achieved_fraction"], 1)
        or type(plan["kv_bytes_before"]) is not int
        or plan["kv_bytes_before"] < 0
    ):
        raise ValueError(f"implausible plan {short(plan)}")
    options = CompactionOptions(**data["options"])
    if options.grows:
        raise ValueError("a growing cache, which no file holds")
    saved = SavedCache(
        identity=Identity(data["model"], data["tokenizer"], data["scorer"]),
        options=options,
        extent=extent,
        plan=Plan(layers=[], context=extent.context, kept=[], gate_means=[], **plan),
        seconds=seconds,
        ids=None,
        padding=None,
    )
    return saved, data["layers"]


def _object(text: str) -> dict[str, Any]:
    return parse_json(text.encode("utf-8", "surrogatepass"))


def _keys(what: str, data: Any, names: set[str]) -> None:
    if not isinstance(data, dict) or set(data) != names:
        found = set(data) if isinstance(data, dict) else set()
        raise ValueError(
            f"{what}: missing keys {sorted(names - found)}, unknown keys {short(sorted(found - names)[:4])}"
        )


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= min(most, sys.float_info.max)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
