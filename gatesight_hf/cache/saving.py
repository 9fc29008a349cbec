"""Compacted caches into files and back: what of a context is saved, and how a model gets it again."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..entries.held import Extent
from ..errors import CacheStateError
from ..models._compat import cache_argument
from ..scoring.interface import Scorer
from .context import Context
from .header import SavedCache
from .identity import Identity
from .storage import AbsentScorer, CacheFile, save_cache
from .tokens import Tokens


def save(context: Context, path: str | Path, tokenizer: Any, session: dict[str, Any] | None = None) -> None:
    """See `GateSightCache.save`; `session` is JSON that `load` gives back."""
    if not context.is_compacted or context.plan is None:
        raise CacheStateError("Only a compacted cache can be saved: prefill a context and call compact() first.")
    if context.options.grows:
        raise CacheStateError(
            "A growing cache cannot be saved: its scores and its record of new tokens have no place in the file. "
            "Save one made without growing and recompact_every."
        )
    if context.tokens.rope_deltas is not None:
        raise CacheStateError("A cache of a multimodal model cannot be saved: files hold no positions on three axes.")
    layers = _held_by_files(context.layers)
    model, plan = context.model.existing(), context.plan
    saved = SavedCache(
        identity=Identity.of(model, tokenizer, context.scorer),
        options=context.options,
        extent=Extent(context.batch_size, plan.context, context.seen - plan.context),
        plan=plan,
        seconds=context.seconds,
        ids=context.tokens.ids,
        padding=context.tokens.padding,
        session=session,
    )
    save_cache(path, saved, layers)


def load(
    cache_class: Any, path: str | Path, model: Any, tokenizer: Any, scorer: Scorer | None
) -> tuple[Any, dict[str, Any] | None]:
    """See `GateSightCache.load`: the cache, and what a session added."""
    with CacheFile(path) as file:
        file.check(Identity.of(model, tokenizer, scorer))
        cache = cache_class(scorer or AbsentScorer(file.saved.identity.scorer), model, **asdict(file.saved.options))
        context: Context = cache.context
        layers = _held_by_files(context.layers)
        with torch.no_grad():
            token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
            model(token, **{cache_argument(model): cache}, use_cache=True)
        saved = file.load_layers(layers, token.device)
    context.recording, context.plan, context.seconds = None, saved.plan, saved.seconds
    context.tokens = Tokens(saved.extent.context + saved.extent.tail, saved.ids, saved.padding)
    return cache, saved.session


def _held_by_files(layers: Sequence[Any]) -> list[Any]:
    """The layers; raises CacheStateError if there is one that files of caches have no place for."""
    if without := sorted({type(layer).__name__ for layer in layers if layer.kind is None}):
        raise CacheStateError(f"Caches with {', '.join(without)} cannot be saved: files hold no such layers.")
    return list(layers)
