"""The scripts that make the language model: its corpus, tokenizer, planted documents, slow heads, and going on."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ..helpers.paths import ROOT

pytestmark = pytest.mark.quick

ROOM = ROOT / "eval" / "language_model"
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16}
TINY |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.fixture(scope="module")
def room() -> Any:
    """The folder's modules."""
    sys.path.insert(0, str(ROOM))
    try:
        import corpus
        import network
        import planted
        import tokens
        import train
    finally:
        sys.path.remove(str(ROOM))
    # By its own name another test's script could be meant.
    sys.modules.pop("train")
    return SimpleNamespace(corpus=corpus, network=network, planted=planted, tokens=tokens, train=train)


@pytest.fixture(scope="module")
def tokenizer(room: Any) -> Any:
    return room.tokens.load()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder with tokens of a few sentences in every split and kind."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    words = "the model reads a file and writes an answer when it is asked for one".split()
    text = " ".join(f"{' '.join(rng.choices(words, k=9))}." for _ in range(600))
    ids = np.array(tokenizer(text).input_ids, dtype=np.uint16)
    for split in ("training", "evaluation"):
        for kind in ("documentation", "book", "code"):
            (folder / f"{split}.{kind}.bin").write_bytes(ids.tobytes())
    return folder


@pytest.fixture
def filler(room: Any, tokenizer: Any, data: Path) -> Any:
    return room.planted.Filler(room.train.Text(data, "training").window, tokenizer)


def trainer(room: Any, tokenizer: Any, data: Path, out: Path, *options: str) -> Any:
    torch.manual_seed(0)
    args = room.train.parse_args(
        ["--data", str(data), "--out", str(out), "--batch-factor", "0.1", "--warm-up", "1", *options]
    )
    model = room.network.build(len(tokenizer), args.phase or 1, args.seed, **TINY)
    return room.train.Trainer(args, model, tokenizer, room.train.Text(data, "training"))


# -- corpus and tokenizer ----------------------------------------------------------------------------------------------


def test_documents_are_split_by_their_names_in_the_shares_that_the_card_says(room: Any) -> None:
    splits = [room.corpus.split_of(f"package/{i}.html") for i in range(5000)]
    assert splits == [room.corpus.split_of(f"package/{i}.html") for i in range(5000)]
    assert 0.03 < splits.count("estimator") / 5000 < 0.05
    assert 0.03 < splits.count("evaluation") / 5000 < 0.05


def test_a_repeated_paragraph_stays_where_it_came_first(room: Any) -> None:
    duplicates = room.corpus.Duplicates()
    licence = "This paragraph stands in every file of the package, and says nothing that is new to a reader."
    first, second = f"{licence}\n\n{'Of files. ' * 20}", f"{licence}\n\n{'Of folders. ' * 20}"
    assert duplicates.strip(first, "documentation") == first
    assert licence not in duplicates.strip(second, "documentation")
    assert duplicates.strip(second, "code") == ""  # all of it has been seen


def test_html_becomes_its_main_text(room: Any) -> None:
    page = b"""<html><body><nav>Home</nav><div role="main"><h1>Files<a class="headerlink">x</a></h1>
    <p>They are
    \xe2\x80\x9copened\xe2\x80\x9d.</p><pre>with open(name) as f:\n    pass</pre></div>
    <footer>2020</footer></body></html>"""
    page = page.replace(b"<body>", b"<meta charset=utf-8><body>")
    assert room.corpus.text_of_html(page) == 'Files\n\nThey are "opened".\n\nwith open(name) as f:\n    pass'


@pytest.mark.parametrize(
    "text", ["a b\n    c = 12345", "naïve – “quoted” 你好", "<|im_start|>user\nhi<|im_end|>\n", "  \t\n"]
)
def test_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_stand_apart_and_the_chat_template_marks_turns(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2048") == ["in", "Ġ", "2", "0", "4", "8"]
    assert len(tokenizer) == 6144
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat).input_ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


# -- planted documents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_multikey_2", "niah_multiquery", "vt", "qa", "records", "repeat"]
)
def test_answers_stand_in_the_context(room: Any, filler: Any, task: str) -> None:
    for seed in range(4):
        document = room.planted.TASKS[task](room.planted.Draw(random.Random(seed)), filler, 500)
        assert all(fact.strip() in document.context for fact in document.planted)
        for question in document.questions:
            parts = [question.answer] if task in ("repeat", "records") else question.answer.replace(",", " ").split()
            assert all(part.strip() in document.context for part in parts)
        assert filler.count(document.context) < 600


def test_every_level_gives_documents_of_its_length(room: Any, filler: Any, tokenizer: Any) -> None:
    for level, (length, _) in enumerate(room.planted.LEVELS[:6]):
        for seed in range(12):
            _, document = room.planted.for_training(random.Random(seed), filler, level)
            ids, marks = room.planted.encode(document, tokenizer)
            assert len(ids) == len(marks) and 2 in marks
            assert marks.count(0) < 1.5 * length + 200  # RULER's instructions alone have some 100 tokens


def test_training_and_evaluation_plant_different_names_and_numbers(room: Any) -> None:
    drawn = {
        side: {
            make()
            for draw in [room.planted.Draw(random.Random(1), side)]
            for make in (draw.compound, draw.uuid, draw.person, lambda draw=draw: draw.number(7), draw.code)
            for _ in range(60)
        }
        for side in (True, False)
    }
    assert all(room.planted.is_for_training(name) for name in drawn[True])
    assert not any(room.planted.is_for_training(name) for name in drawn[False])
    assert drawn[True].isdisjoint(drawn[False])


def test_only_questions_and_answers_are_supervised_in_chat_form_too(room: Any, tokenizer: Any) -> None:
    document = room.planted.Document("a: 12\n", [room.planted.Question("a:", " 12")])
    for chat, answer in ((False, " 12\n"), (True, "12<|im_end|>\n")):
        ids, marks = room.planted.encode(document, tokenizer, chat)
        assert tokenizer.decode([i for i, mark in zip(ids, marks, strict=True) if mark == 2]) == answer


# -- slow heads and training -------------------------------------------------------------------------------------------


def test_slow_heads_are_let_in_without_a_change_and_learn_from_then_on(room: Any) -> None:
    narrow, wide = (room.network.build(300, phase, 0, **TINY) for phase in (1, 2))
    room.network.let_in_slow_heads(narrow, wide)
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wide(ids).logits, narrow(ids).logits, rtol=1e-4, atol=1e-4)
    slow = room.network.slow_heads(wide.config.linear_num_value_heads)
    fastest_slow = min(float(room.network.half_lives(layer)[slow].min()) for layer in room.network.gdn_layers(wide))
    assert fastest_slow == pytest.approx(24.0, rel=1e-3)
    with torch.enable_grad():
        wide(ids, labels=ids).loss.backward()
    for layer in room.network.gdn_layers(wide):
        columns = layer.out_proj.weight.grad[:, slow[0] * wide.config.linear_value_head_dim :]
        assert float(columns.abs().max()) > 0


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    room: Any, tokenizer: Any, data: Path, tmp_path: Path
) -> None:
    whole = trainer(room, tokenizer, data, tmp_path)
    with torch.enable_grad(), room.network.fast_delta_rule():
        whole.step()
        whole.save(tmp_path / "checkpoint.pt")
        expected = whole.step()
        stopped = trainer(room, tokenizer, data, tmp_path, "--seed", "0")
        stopped.load(tmp_path / "checkpoint.pt")
        assert stopped.step() == expected
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(dict(stopped.model.named_parameters())[name], parameter, rtol=0, atol=0)


def test_the_second_phase_begins_with_slow_heads_and_the_size_of_the_first(
    room: Any, tokenizer: Any, data: Path, tmp_path: Path
) -> None:
    args = room.train.parse_args(["--data", str(data), "--out", str(tmp_path)])
    small = room.network.build(len(tokenizer), 1, 0, **room.network.size_options(64, 4))
    run = room.train.Trainer(args, small, tokenizer, room.train.Text(data, "training"))
    run.begin_phase(2)
    assert run.model.config.linear_num_value_heads == 2 * small.config.linear_num_value_heads
    assert (run.model.config.hidden_size, run.model.config.num_hidden_layers) == (64, 4)
    trained = {id(p) for group in run.optimiser.param_groups for p in group["params"]}
    assert trained == {id(p) for p in run.model.parameters()}


def test_the_learning_rate_is_constant_until_a_decay_is_asked_for(
    room: Any, tokenizer: Any, data: Path, tmp_path: Path
) -> None:
    run = trainer(room, tokenizer, data, tmp_path, "--decay-steps", "10")
    run.state.update(step=500, phase_step=500)
    assert run.rate() == 1.0
    run.state.update(decay_from=495)
    assert run.rate() == 0.5
