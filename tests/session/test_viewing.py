"""`session.view()` shows what the session itself keeps."""

from typing import Any

import pytest
import torch

from gatesight_hf import CacheStateError, Session
from gatesight_hf.view import FRACTIONS

from ..helpers.chats import TEXT, chat_tokenizer
from ..helpers.models import KeyNorm

pytestmark = pytest.mark.core
ADDED = "A codicil says that all is otherwise. " * 4


class Counted(KeyNorm):
    def __init__(self) -> None:
        self.calls = 0

    def score(self, prefill: Any) -> list[torch.Tensor]:
        self.calls += 1
        return super().score(prefill)


def opened(model: Any, **options: Any) -> Session:
    return Session.open(model, chat_tokenizer(), Counted(), TEXT * 2, **{"kept_fraction": 0.3, **options})


@pytest.mark.parametrize("added", ["", ADDED])
@pytest.mark.parametrize("suffix", [0, 3])
def test_what_is_shown_is_what_the_session_keeps(model, added, suffix):
    session = opened(model, protected_suffix=suffix)
    if added:
        session.add(added)
    session.cache.scorer.calls = 0
    view = session.view(["Who?"], {}, max_new_tokens=8).view
    assert session.cache.scorer.calls == 1
    shown = view.methods[0].mask(FRACTIONS.index(0.3))
    total = session.cache.get_seq_length()
    tail = total - session.cache.context.plan.context
    assert (len(view.tokens), view.protected_suffix) == (total, suffix + tail) and (tail > 0) == bool(added)
    for layer, of_layer in zip(session.cache.attention_layers, shown, strict=True):
        kept = torch.zeros_like(of_layer).scatter_(1, layer.kept_positions[0].expand(len(of_layer), -1), True)
        kept[:, total - tail :] = True
        assert torch.equal(of_layer, kept)
    assert view.answered[0].answers["kept"] == session.ask("Who?", 8)
    whole = opened(model, kept_fraction=1.0)
    if added:
        whole.add(added)
    assert view.answered[0].answers["full"] == whole.ask("Who?", 8)


def test_methods_may_have_any_names(model):
    names = [("gatesight",), ("gatesight", "session"), ("session 2", "gatesight", "session")]
    shown = [[m.name for m in opened(model).view((), dict.fromkeys(of, KeyNorm())).view.methods] for of in names]
    assert shown == [["session", *names[0]], ["session 2", *names[1]], ["session 3", *names[2]]]


def test_what_was_compacted_again_is_not_shown(model):
    session = opened(model, recompact_every=8)
    assert session.view().view.methods
    session.add(ADDED)
    with pytest.raises(CacheStateError, match="compacted again"):
        session.view()
