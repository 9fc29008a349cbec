"""Images among the tokens: a cache gives its own context's positions, whatever the model has seen since."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from gatesight_hf import CacheStateError, FrozenCache, GateSightCache, UnsupportedModelError
from gatesight_hf.methods import ExpectedAttention, KVzip, RandomScorer, SnapKV
from gatesight_hf.models import HybridSpec, attach
from gatesight_hf.models._compat import cache_argument

from ..helpers.models import (
    IMAGE,
    MULTIMODAL,
    VIDEO,
    VISION_END,
    VISION_START,
    random_estimator,
    tiny_model,
    tiny_multimodal,
)
from ..helpers.oracle import Oracle, assert_same, evicted_of
from ..helpers.running import as_new, cache_kwargs

pytestmark = pytest.mark.core

FRACTIONS = (1.0, 0.5, 0.2)


def text_ids(length: int, seed: int) -> Tensor:
    return torch.randint(2, 100, (1, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Prompt:
    """Text with images of the given grids, or frames of a video, and what the model's processor would make of it."""

    before: int
    grids: tuple[tuple[int, int], ...]
    after: int
    seed: int = 0
    token: int = IMAGE

    @property
    def ids(self) -> Tensor:
        parts = [text_ids(self.before, self.seed)]
        for k, (height, width) in enumerate(self.grids):
            image = [VISION_START, *[self.token] * (height * width // 4), VISION_END]
            parts += [torch.tensor([image]), text_ids(self.after, self.seed + 10 + k)]
        return torch.cat(parts, dim=1)

    @property
    def inputs(self) -> dict[str, Tensor]:
        given = {"input_ids": self.ids}
        if self.grids:
            patches = sum(height * width for height, width in self.grids)
            generator = torch.Generator().manual_seed(self.seed)
            pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
            if self.token == VIDEO:
                given["pixel_values_videos"] = pixels
                given["video_grid_thw"] = torch.tensor([[len(self.grids), *self.grids[0]]])
            else:
                given["pixel_values"] = pixels
                given["image_grid_thw"] = torch.tensor([[1, height, width] for height, width in self.grids])
            given["mm_token_type_ids"] = (self.ids == IMAGE).int() + 2 * (self.ids == VIDEO).int()
        return given

    @property
    def positions(self) -> Tensor:
        """`[3, T]` by the rule of the model's paper: an image's rows and columns count from where it stands."""
        places: list[tuple[int, int, int]] = []
        position, images, ids = 0, iter(self.grids), self.ids[0].tolist()
        while len(places) < len(ids):
            if ids[len(places)] in (IMAGE, VIDEO):
                height, width = (side // 2 for side in next(images))
                places += [(position, position + y, position + x) for y in range(height) for x in range(width)]
                position += max(height, width)
            else:
                places.append((position,) * 3)
                position += 1
        return torch.tensor(places).T


PICTURE = Prompt(before=9, grids=((4, 8),), after=14)
PICTURES = Prompt(before=3, grids=((8, 4), (4, 4)), after=11, seed=3)
TEXT = Prompt(before=31, grids=(), after=0, seed=5)
MOVIE = Prompt(before=4, grids=((4, 8), (4, 8)), after=6, seed=6, token=VIDEO)
PROMPTS = {"image": PICTURE, "two images": PICTURES, "video": MOVIE, "text": TEXT}


@pytest.fixture(scope="module", params=MULTIMODAL)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_multimodal(request.param)


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    """Its twin without hooks, in eager attention."""
    twin = tiny_multimodal(next(name for name, (kind, _) in MULTIMODAL.items() if isinstance(model, kind)))
    twin.set_attn_implementation("eager")
    return twin


def run(model: Any, cache: Any, **inputs: Tensor) -> Tensor:
    return model(**inputs, **cache_kwargs(model, cache)).logits


def tokens_of(model: Any, cache: Any, count: int = 5, **inputs: Any) -> tuple[Tensor, Tensor]:
    options = {"max_new_tokens": count, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ids = inputs.get("input_ids")
    if isinstance(cache, GateSightCache) and ids is not None and cache.get_seq_length() > ids.shape[1]:
        options |= as_new(ids, cache)
    found = model.generate(**{**options, **inputs}, **cache_kwargs(model, cache))
    return found.sequences[:, -count:], torch.stack(found.logits, dim=1)


def cached(model: Any, prompt: Prompt, **options: Any) -> GateSightCache:
    cache = GateSightCache(random_estimator(model), model, **options)
    run(model, cache, **prompt.inputs)
    return cache


@contextmanager
def fresh(plain: Any, prompt: Prompt, evicted: list[Tensor]) -> Iterator[DynamicCache]:
    """A full cache of a prompt on a model that has seen nothing else, with evicted entries hidden from later tokens."""
    plain.model.rope_deltas = None
    cache = DynamicCache(config=plain.config)
    with Oracle(plain, evicted):
        run(plain, cache, **prompt.inputs)
        yield cache


@contextmanager
def positions_seen(model: Any) -> Iterator[list[Tensor]]:
    """Positions that reach the rotary embedding, `[axes, B, T]` by forward."""
    seen: list[Tensor] = []
    rotary = model.model.language_model.rotary_emb
    handle = rotary.register_forward_pre_hook(lambda module, args, kwargs: seen.append(args[1]), with_kwargs=True)
    yield seen
    handle.remove()


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_question_equals_the_oracle(model: Any, plain: Any, prompt: Prompt, fraction: float) -> None:
    """Interleaved: two other documents are prefilled between the context and each of its questions."""
    cache = cached(model, prompt, kept_fraction=fraction)
    others = [cached(model, other) for other in (PICTURES, TEXT, PICTURE) if other is not prompt]
    cache.compact()
    for length in (1, 6):
        question = text_ids(length, 77)
        found = run(model, cache.fork(), input_ids=question)
        run(model, others[length % 2], input_ids=question)
        with fresh(plain, prompt, evicted_of(cache, 0, prompt.ids.shape[1])) as full:
            assert_same(found, run(plain, full, input_ids=question))


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_keeping_all_equals_a_dynamic_cache_bit_for_bit(model: Any, prompt: Prompt) -> None:
    question = text_ids(6, 78)
    model.model.rope_deltas = None
    expected = DynamicCache(config=model.config)
    first = run(model, expected, **prompt.inputs)
    later = run(model, expected, input_ids=question)
    cache = GateSightCache(random_estimator(model), model, kept_fraction=1.0)
    assert torch.equal(run(model, cache, **prompt.inputs), first)
    cache.compact()
    cached(model, PICTURES)
    assert torch.equal(run(model, cache, input_ids=question), later)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("whole", [True, False], ids=["all ids", "new ids"])
def test_generate_equals_the_oracle(model: Any, plain: Any, prompt: Prompt, whole: bool) -> None:
    """From the prompt on, and with a question from a child, after another document each time."""
    cache = GateSightCache(random_estimator(model), model, kept_fraction=0.4)
    tokens, logits = tokens_of(model, cache, **prompt.inputs)
    assert cache.is_compacted
    evicted = evicted_of(cache, 0, prompt.ids.shape[1])
    with fresh(plain, prompt, evicted) as full:
        expected = [run(plain, full, input_ids=token) for token in tokens[:, :-1].split(1, dim=1)]
    assert_same(logits[:, 1:], torch.cat(expected, dim=1))

    cache = cached(model, prompt, kept_fraction=0.4)
    cache.compact()
    cached(model, PICTURES if prompt is PICTURE else PICTURE)
    question = text_ids(4, 79)
    given = {**prompt.inputs, "input_ids": torch.cat([prompt.ids, question], 1)} if whole else {"input_ids": question}
    if whole and prompt.grids:
        kinds = given["mm_token_type_ids"]
        given["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, 4)], dim=1)
    tokens, logits = tokens_of(model, cache.fork(), **given)
    with fresh(plain, prompt, evicted_of(cache, 0, prompt.ids.shape[1])) as full:
        expected = [run(plain, full, input_ids=part) for part in (question, *tokens[:, :-1].split(1, dim=1))]
    assert_same(logits, torch.cat([part[:, -1:] for part in expected], dim=1))


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_positions_are_those_of_the_rule(model: Any, prompt: Prompt) -> None:
    with positions_seen(model) as seen:
        cache = cached(model, prompt)
    assert torch.equal(seen[0][:, 0], prompt.positions)
    assert cache.prefill().next_positions == [int(prompt.positions.max()) + 1]


def test_positions_are_those_of_the_rule_in_every_chunk_and_for_every_child(model: Any) -> None:
    """An image in a later chunk, too: the model itself would number it as text."""
    prompt = Prompt(before=3, grids=((8, 4), (4, 4)), after=11, seed=3)
    ids, images = prompt.ids, prompt.inputs
    cut = 3 + 10 + 5  # inside the text after the first image
    cache = GateSightCache(random_estimator(model), model, kept_fraction=0.5)
    kinds, pixels, grid = images["mm_token_type_ids"], images["pixel_values"], images["image_grid_thw"]
    with positions_seen(model) as seen:
        run(model, cache, input_ids=ids[:, :cut], pixel_values=pixels[:32], image_grid_thw=grid[:1],
            mm_token_type_ids=kinds[:, :cut])  # fmt: skip
        cached(model, PICTURE)
        run(model, cache, input_ids=ids[:, cut:], pixel_values=pixels[32:], image_grid_thw=grid[1:],
            mm_token_type_ids=kinds[:, cut:])  # fmt: skip
        cache.compact()
        child = cache.fork()
        run(model, child, input_ids=text_ids(2, 1))
        run(model, child.fork(), input_ids=text_ids(1, 1))
        run(model, cache.fork(), input_ids=text_ids(1, 1))
    first, _, second, asked, grandchild, sibling = seen
    assert torch.equal(torch.cat([first, second], dim=-1)[:, 0], prompt.positions)
    following = int(prompt.positions.max()) + 1
    assert following < ids.shape[1]
    assert asked[:, 0].tolist() == [[following, following + 1]] * 3
    assert grandchild.flatten().tolist() == [following + 2] * 3
    assert sibling.flatten().tolist() == [following] * 3


def test_a_question_with_an_image_of_its_own(model: Any, plain: Any) -> None:
    """Through a forward and through generate, equal to the oracle given both images at once."""
    question = Prompt(before=2, grids=((4, 4),), after=3, seed=21)
    cache = cached(model, PICTURE, kept_fraction=0.5)
    cache.compact()
    cached(model, PICTURES)
    evicted = evicted_of(cache, 0, PICTURE.ids.shape[1])
    ids = torch.cat([PICTURE.ids, question.ids], dim=1)
    both = Prompt(before=9, grids=((4, 8), (4, 4)), after=0).positions
    found = run(model, cache.fork(), **question.inputs)
    tokens, logits = tokens_of(model, cache.fork(), **question.inputs)
    position = torch.cat([PICTURE.positions, question.positions + PICTURE.positions.max() + 1], dim=1)
    assert int(position.max()) >= int(both.max())
    with fresh(plain, PICTURE, evicted) as full:
        asked = {**question.inputs, "position_ids": position[:, None, PICTURE.ids.shape[1] :]}
        expected = run(plain, full, **asked)
        assert_same(found, expected)
        plain.model.rope_deltas = position.max() + 1 - torch.tensor([[ids.shape[1]]])
        later = [run(plain, full, input_ids=token) for token in tokens[:, :-1].split(1, dim=1)]
    assert_same(logits, torch.cat([expected[:, -1:], *later], dim=1))


def test_ragged_rows_of_images_and_text_equal_rows_alone(model: Any) -> None:
    rows = [PICTURE, Prompt(before=12, grids=(), after=0, seed=8), PICTURES]
    longest = max(row.ids.shape[1] for row in rows)
    pads = [longest - row.ids.shape[1] for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row.ids, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.stack([torch.arange(longest) >= pad for pad in pads]).long()
    cache = GateSightCache(random_estimator(model), model, kept_fraction=0.4)
    run(model, cache, input_ids=ids, attention_mask=mask, mm_token_type_ids=(ids == IMAGE).int(),
        pixel_values=torch.cat([rows[i].inputs["pixel_values"] for i in (0, 2)]),
        image_grid_thw=torch.cat([rows[i].inputs["image_grid_thw"] for i in (0, 2)]))  # fmt: skip
    cache.compact()
    question = text_ids(5, 80).repeat(3, 1)
    found = run(model, cache.fork(), input_ids=question)
    steps, logits = tokens_of(model, cache.fork(), input_ids=question)
    cache.batch_select_indices(torch.tensor([2, 0]))
    picked = run(model, cache, input_ids=question[:2])
    for r, row in enumerate(rows):
        alone = cached(model, row, kept_fraction=0.4)
        alone.compact()
        assert_same(found[r : r + 1], run(model, alone.fork(), input_ids=question[:1]))
        expected_steps, expected = tokens_of(model, alone, input_ids=question[:1])
        assert_same(logits[r : r + 1], expected)
        assert torch.equal(steps[r : r + 1], expected_steps)
    assert_same(picked, found[[2, 0]])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_beams_and_several_sequences(model: Any, plain: Any, options: dict[str, Any]) -> None:
    """The oracle gives the returned tokens the logits, or the best beam the score, that they were chosen by."""
    cache = cached(model, PICTURE, kept_fraction=0.5)
    cache.compact()
    cached(model, PICTURES)
    question = text_ids(4, 81)
    given = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    given |= as_new(question, cache)
    found = model.generate(question, **given, **{"do_sample": False, **options}, **cache_kwargs(model, cache.fork()))
    for r, tokens in enumerate(found.sequences[:, 4:]):
        with fresh(plain, PICTURE, evicted_of(cache, 0, PICTURE.ids.shape[1])) as full:
            logits = run(plain, full, input_ids=torch.cat([question, tokens[None, :-1]], dim=1))[0, -5:]
        if "num_beams" in options:
            chosen = logits.log_softmax(-1).gather(1, tokens[:, None])
            assert_same(found.sequences_scores[r], chosen.mean())
        else:
            assert_same(torch.stack([step[r] for step in found.logits]), logits)


@pytest.mark.parametrize("scorer", [SnapKV(window=8), ExpectedAttention(future=16)], ids=lambda s: type(s).__name__)
def test_other_methods_look_ahead_from_the_next_position(model: Any, scorer: Any) -> None:
    """A picture before the text moves all later positions alike: scores that read distances only do not change."""
    cache = GateSightCache(scorer, model, allocation="flat")
    run(model, cache, **PICTURE.inputs)
    prefill = cache.prefill()
    assert prefill.next_positions == [int(PICTURE.positions.max()) + 1]
    assert prefill.next_positions[0] < prefill.lengths[0]
    before = scorer.score(prefill)
    explicit = GateSightCache(scorer, model, allocation="flat")
    run(model, explicit, **PICTURE.inputs, position_ids=PICTURE.positions[:, None] + 5)
    assert explicit.prefill().next_positions == [prefill.next_positions[0] + 5]
    for found, expected in zip(scorer.score(explicit.prefill()), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoded", (), {"input_ids": [2 + ord(letter) % 90 for letter in text]})


def test_kvzip_refuses_to_repeat_pictures_without_them(model: Any) -> None:
    scorer = KVzip(model, Letters(), chunk=64)
    text = cached(model, TEXT)
    assert [scores.shape for scores in scorer.score(text.prefill())] == [(1, 2, 31)] * 2
    with pytest.raises(CacheStateError, match="images or videos"):
        scorer.score(cached(model, PICTURE).prefill())


# -- boundaries --------------------------------------------------------------------------------------------------------


def test_a_failed_forward_leaves_the_positions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cached(model, PICTURE, kept_fraction=0.5)
    cache.compact()
    question = text_ids(3, 82)
    expected = run(model, cache.fork(), input_ids=question)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(model.model.language_model.layers[5].mlp, "forward", fail)
        with pytest.raises(ArithmeticError):
            run(model, cache, **PICTURES.inputs)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.visual, "forward", fail)
        with pytest.raises(ArithmeticError):
            run(model, cache, **PICTURES.inputs)
    assert cache.get_seq_length() == PICTURE.ids.shape[1]
    assert torch.equal(run(model, cache, input_ids=question), expected)


def test_new_images_among_ids_that_repeat_the_context_are_refused(model: Any) -> None:
    cache = cached(model, PICTURE)
    cache.compact()
    question = Prompt(before=2, grids=((4, 4),), after=3, seed=21)
    ids = torch.cat([PICTURE.ids, question.ids], dim=1)
    pixels = torch.cat([PICTURE.inputs["pixel_values"], question.inputs["pixel_values"]])
    with pytest.raises(CacheStateError, match=r"new ids alone.*attention_mask"):
        model.generate(input_ids=ids, pixel_values=pixels, mm_token_type_ids=(ids == IMAGE).int(),
                       image_grid_thw=torch.tensor([[1, 4, 8], [1, 4, 4]]), **cache_kwargs(model, cache))  # fmt: skip


def test_images_without_their_places_are_refused(model: Any) -> None:
    inputs = PICTURE.inputs
    del inputs["mm_token_type_ids"]
    cache = GateSightCache(random_estimator(model), model)
    with pytest.raises(ValueError, match="mm_token_type_ids"):
        run(model, cache, **inputs)
    assert cache.get_seq_length() == 0


def test_embeddings_that_go_on_are_refused_without_positions(model: Any) -> None:
    cache = cached(model, PICTURE)
    cache.compact()
    embeddings = model.get_input_embeddings()(text_ids(3, 83))
    with pytest.raises(ValueError, match="position_ids"):
        model.generate(inputs_embeds=embeddings, attention_mask=torch.ones(1, 3), **cache_kwargs(model, cache))


def test_an_estimator_of_the_text_model_fits_and_hooks_come_off(model: Any) -> None:
    text = tiny_model("qwen3_5" if model.config.model_type == "qwen3_5" else "qwen3_5_moe")
    assert HybridSpec.from_config(model.config) == HybridSpec.from_config(text.config)
    cache = GateSightCache(random_estimator(text), model)
    run(model, cache, **PICTURE.inputs)
    attach(model).remove()
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    assert not [m for m in model.modules() if any(getattr(m, kind) for kind in hooks) or "generate" in vars(m)]
    inner = model.model.language_model
    attach(inner)
    assert attach(model) is attach(inner)
    cache = cached(model, PICTURE)
    assert cache.prefill().next_positions == [int(PICTURE.positions.max()) + 1]


def test_a_multimodal_config_without_such_a_model_is_refused(model: Any) -> None:
    text = tiny_model()
    text.config = model.config
    with pytest.raises(UnsupportedModelError, match="joins the text model"):
        GateSightCache(RandomScorer(), text)
    assert not any(module._forward_pre_hooks for module in text.modules())


def test_ids_of_images_are_known(model: Any) -> None:
    """Though the text model is given embeddings: text that goes on differently is told from text that repeats."""
    cache = cached(model, PICTURE)
    cache.compact()
    short = PICTURE.ids[:, :-2]
    with pytest.raises(CacheStateError, match="shorter prefix"):
        model.generate(input_ids=short, max_new_tokens=2, **{cache_argument(model): cache})


@pytest.mark.parametrize("rows", [1, 2])
def test_a_frozen_cache_goes_on_from_its_pictures(model: Any, rows: int) -> None:
    cache = cached(model, PICTURES, kept_fraction=0.5)
    cache.compact()
    cached(model, TEXT)  # another document, whose positions the model has by now
    question = torch.cat([text_ids(5, 40 + row) for row in range(rows)])
    expected, logits = tokens_of(model, cache.fork(), input_ids=question)
    frozen = FrozenCache(cache, 16)
    for _ in range(2):
        tokens, found = tokens_of(model, frozen, input_ids=question)
        assert torch.equal(tokens, expected)
        assert_same(found, logits)
        frozen.rewind()
    assert_same(run(model, frozen, input_ids=question), run(model, cache.fork(), input_ids=question))
    with pytest.raises(CacheStateError, match="no new images"):
        run(model, frozen, **{**PICTURE.inputs, "input_ids": PICTURE.ids.expand(rows, -1)})
