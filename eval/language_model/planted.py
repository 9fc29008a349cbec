"""Documents with planted facts in natural text, and questions on them, for training and for the checks.

The tasks are RULER's (arXiv 2404.06654), in its templates and in plainer ones, and repeating what was read. What they
plant is held apart by a hash: training draws names and numbers from the tenth of all that `is_for_training` names, the
checks from the rest. Words and numbers of the short lists that the curriculum begins with are too few for that.
"""

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from gatesight_eval.suites.ruler.sources import compound_words, word_list
from gatesight_eval.suites.ruler.templates import CWE, FWE, NEEDLE, NIAH, NIAH_SINGULAR, NOISE, QA, VT

#: `(context tokens, most records)` of the curriculum's levels.
LEVELS = ((20, 2), (40, 4), (80, 8), (160, 16), (320, 32), (640, 64), (1024, 100), (2048, 180), (4096, 250))


@dataclass(frozen=True)
class Question:
    """`text` ends where the answer begins; `answer` has its leading blank; `end` is what follows it."""

    text: str
    answer: str
    end: str = "\n"


@dataclass(frozen=True)
class Document:
    """A context with its questions; `planted` are the facts' texts."""

    context: str
    questions: list[Question]
    planted: list[str] = field(default_factory=list)


# -- what is planted ---------------------------------------------------------------------------------------------------


def is_for_training(name: str) -> bool:
    """Whether training may plant this key, name or number: one in ten. Evaluation takes the others."""
    return hashlib.sha256(name.encode()).digest()[0] % 10 == 0


class Draw:
    """Random keys, names and numbers of one side of the hold-out."""

    def __init__(self, rng: random.Random, training: bool = True) -> None:
        self.rng, self.training = rng, training

    def _held(self, make: Callable[[], str]) -> str:
        while is_for_training(drawn := make()) is not self.training:
            pass
        return drawn

    def compound(self) -> str:
        return self._held(lambda: self.rng.choice(compound_words()))

    def number(self, digits: int) -> str:
        low = 10 ** (digits - 1)
        make = lambda: str(self.rng.randrange(low, 10 * low))  # noqa: E731
        return self._held(make) if digits >= 4 else make()

    def uuid(self) -> str:
        return self._held(lambda: _uuid(self.rng))

    def variable(self, length: int) -> str:
        return self._held(lambda: "".join(self.rng.choices(string.ascii_uppercase, k=length)))

    def code(self) -> str:
        return self._held(lambda: "".join(self.rng.choices(string.ascii_lowercase, k=6)))

    def person(self) -> str:
        return self._held(lambda: f"{self.rng.choice(FIRST_NAMES)} {self.rng.choice(LAST_NAMES)}")

    def distinct(self, make: Callable[[], str], count: int) -> list[str]:
        found: dict[str, None] = {}
        for _ in range(50 * count):
            if len(found) == count:
                break
            found[make()] = None
        return list(found)


def _uuid(rng: random.Random) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], "4" + digits[13:16], digits[16:20], digits[20:]))


FIRST_NAMES = (
    "Ada Alan Alice Amir Anna Ben Boris Carla Chen Clara David Diana Elena Emil Erik Eva Felix Fiona Grace Greta Hana "
    "Hugo Ida Igor Iris Ivan Jack Jane Jonas Julia Karl Kate Lara Leo Lena Lucy Maja Marco Maria Mark Max Mia Milan "
    "Nina Noah Nora Olga Omar Oscar Otto Paul Petra Rita Robert Rosa Ruth Sam Sara Simon Sofia Tara Theo Tom Uma Vera "
    "Victor Walter Wanda Yara Zoe"
).split()
LAST_NAMES = (
    "Adler Baker Becker Berg Blake Brown Carter Castro Clark Cole Cooper Cruz Dahl Dean Diaz Duncan Ellis Evans "
    "Fischer Ford Foster Garcia Grant Gray Green Hall Hansen Harper Hayes Hill Hoffman Howard Hunt Jensen Jones Keller "
    "Kelly King Klein Kumar Lang Larsen Lee Lewis Lopez Marsh Mason Meyer Miller Moore Morgan Nash Nelson Novak Olsen "
    "Owen Palmer Parker Perez Porter Price Quinn Ramos Reed Rossi Russell Sato Schmidt Scott Shaw Silva Singh Stone "
    "Tanaka Taylor Turner Vega Wagner Walker Ward Weber West White Wilson Wolf Wood Young"
).split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Prague Oslo Dublin Athens Lisbon Warsaw Moscow Cairo Delhi Tokyo Sydney "
    "Boston Chicago Denver Dallas Seattle Toronto Lima Seoul Geneva Venice Naples"
)
JOBS = (
    "teacher doctor lawyer farmer painter writer driver baker nurse judge singer sailor soldier builder editor chemist "
    "pilot priest tailor butcher barber banker miner"
)
ANIMALS = "dog cat horse parrot snake turtle goat rabbit mouse sheep donkey duck goose monkey pig cow hen bear lion"
COLORS = "red blue green yellow black white brown orange purple pink gray silver gold violet"
#: `(what is said, what is asked, possible answers)`.
FACTS = (
    ("lives in", "Where does {} live?", CITIES),
    ("works as a", "What is the job of {}?", JOBS),
    (
        "plays the",
        "What instrument does {} play?",
        "piano violin guitar flute trumpet drums harp cello organ horn banjo",
    ),
    ("was born in", "When was {} born?", " ".join(map(str, range(1901, 2000)))),
    ("has a", "What animal does {} have?", ANIMALS),
    ("likes the color", "What color does {} like?", COLORS),
)


#: Words that are one token with and without a blank before them.
COMMON_WORDS = (
    "access account action address air art back bar base bin block body book box call case cat check child class "
    "code color column core count cover current data date day degree distance drop edge element end event face "
    "factor field figure file flat flow force form frame future graph group hand head help hold host image index "
    "item key label land level library light limit line link list lock log loop man map mark mask memory message "
    "method model name net night node note number object order page pair part path pattern period place plan point "
    "pool port position process project query range red result return right root round row sample scale second "
    "section series server set shape side sign signal size source space stack state step store stream string sum "
    "support system table tag task test text thing time top trace tree type unit user value vector view way weight "
    "window word work world zone"
).split()


@cache
def list_words() -> tuple[str, ...]:
    """Short common words, the keys of lists."""
    return tuple(word for word in word_list("noun") if word.isalpha() and 3 <= len(word) <= 8)


# -- text --------------------------------------------------------------------------------------------------------------


class Filler:
    """Sentences of real text, about as many tokens as asked for.

    `window` gives that many tokens of real text; `tokenizer` turns them to text.
    """

    def __init__(self, window: Callable[[random.Random, int], Sequence[int]], tokenizer: Any) -> None:
        self._window, self._tokenizer = window, tokenizer

    def count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False).input_ids)

    def text(self, rng: random.Random, tokens: int) -> str:
        text = self._tokenizer.decode(list(self._window(rng, tokens)), clean_up_tokenization_spaces=False)
        return " ".join(part for part in text.split("<|endoftext|>") if part)

    def pieces(self, rng: random.Random, tokens: int) -> list[str]:
        """Lines or sentences with their final blank or line end."""
        if tokens < 8:
            return []
        pieces = _split(self.text(rng, tokens))
        pieces[-1] = pieces[-1].rstrip() + "\n"
        return pieces


def _split(text: str) -> list[str]:
    pieces, start = [], 0
    for i in range(1, len(text)):
        if text[i - 1] == "\n" or (text[i - 1] == " " and text[i - 2] in ".!?"):
            pieces.append(text[start:i])
            start = i
    return [*pieces, text[start:]]


def scatter(rng: random.Random, facts: Sequence[str], pieces: list[str], in_order: bool = False) -> str:
    """Facts between pieces of text at uniform depths, each with a blank or line end behind."""
    slots = sorted(rng.randint(0, len(pieces)) for _ in facts)
    order = list(facts) if in_order else rng.sample(list(facts), len(facts))
    parts, done = [], 0
    for slot, fact in zip(slots, order, strict=True):
        parts += pieces[done:slot]
        done = slot
        parts.append(fact if fact.endswith("\n") else fact + " ")
    return "".join([*parts, *pieces[done:]])


# -- lists of records --------------------------------------------------------------------------------------------------

#: `(record, beginning of it that asks)`: of the first levels, whose values stand close to their keys, and of all.
PLAIN_FORMS = (
    ("{k}:{v}\n", "{k}:"),
    ("{k}={v}\n", "{k}="),
    ("{k}: {v}\n", "{k}:"),
    ("{k} = {v}\n", "{k} ="),
)
FORMS = (
    ("{k}: {v}\n", "{k}:"),
    ("{k} = {v}\n", "{k} ="),
    ("| {k} | {v} |\n", "| {k} |"),
    ("- {k}: {v}\n", "- {k}:"),
    ("The code of {k} is {v}.\n", "The code of {k} is"),
    ("{k} is in room {v}.\n", "{k} is in room"),
    ("{k}\t{v}\n", "{k}\t"),
)


def records(draw: Draw, filler: Filler, tokens: int, most: int, plain: bool = False, asked: int = 64) -> Document:
    """Keys with a value each, as dense as fits or in text; every one is asked, in another order, in the same form.

    `plain`: two-digit values of short words, mostly of the commonest, without text between: the first levels.
    """
    rng = draw.rng
    form, ask = rng.choice(PLAIN_FORMS if plain else FORMS)
    kind = 0 if plain else rng.randrange(5)
    value: Callable[[], str] = (
        lambda: draw.number(2),
        lambda: draw.number(3),
        lambda: draw.number(4),
        lambda: draw.number(7),
        lambda: rng.choice(list_words()),
    )[kind]
    long_keys = not plain and rng.random() < 0.4
    words = COMMON_WORDS if plain and rng.random() < 0.7 else list_words()
    make_key = draw.compound if long_keys else (lambda: rng.choice(words))
    size = filler.count(form.format(k=make_key(), v=value())) + 1
    most = max(1, min(most, tokens // size))
    count = most if plain or rng.random() < 0.7 else rng.randint(1, most)
    keys = draw.distinct(make_key, count)
    values = {key: value() for key in keys}
    facts = [form.format(k=key, v=values[key]) for key in keys]
    spare = tokens - filler.count("".join(facts))
    in_text = not plain and spare > 24
    context = scatter(rng, facts, filler.pieces(rng, spare) if in_text else [])
    questions = [
        Question(ask.format(k=key), _value(form, values[key]), form.split("{v}")[1])
        for key in rng.sample(keys, min(asked, count))
    ]
    if not plain and rng.random() < 0.3:
        questions = [
            Question(f"Question: What is the value of {key}?\nAnswer:", f" {values[key]}")
            for key in rng.sample(keys, min(asked, count))
        ]
    return Document(context + "\n", questions, facts)


def _value(form: str, value: str) -> str:
    return f" {value}" if " {v}" in form else value


# -- RULER's templates -------------------------------------------------------------------------------------------------


def _listed(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def niah(
    draw: Draw,
    filler: Filler,
    tokens: int,
    *,
    haystack: str = "essay",
    key_kind: str = "words",
    value_kind: str = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    asked: int = 1,
) -> Document:
    """RULER's needles: `asked` questions on `queries` keys each. `haystack` is `essay`, `noise` or `needle`."""
    rng = draw.rng
    make = {"words": draw.compound, "numbers": lambda: draw.number(7), "uuids": draw.uuid}
    wording = NIAH_SINGULAR if values * queries == 1 else NIAH
    kind = value_kind if values * queries > 1 else value_kind[:-1]
    lead = wording.lead.format(kind=kind)
    room = tokens - filler.count(lead)

    def needle(key: str, value: str) -> str:
        return NEEDLE.format(kind=value_kind, key=key, value=value)

    size = filler.count(needle(make[key_kind](), make[value_kind]())) + 1
    count = max(1, room // size) if haystack == "needle" else max(1, min(keys, room // (size * values)))
    names = draw.distinct(make[key_kind], max(count, queries))
    of = {name: [make[value_kind]() for _ in range(values)] for name in names}
    facts = [needle(name, value) for name in names for value in of[name]]
    spare = room - filler.count(" ".join(facts))
    if haystack == "noise":
        context = scatter(rng, [fact + "\n" for fact in facts], [NOISE + "\n"] * max(0, spare // filler.count(NOISE)))
    elif haystack == "needle":
        context = "\n".join(rng.sample(facts, len(facts)))
    else:
        context = scatter(rng, facts, [piece.replace("\n", " ") for piece in filler.pieces(rng, spare)])
    questions = []
    for _ in range(asked):
        query = rng.sample(names, queries)
        answers = [value for name in query for value in of[name]]
        place = {"kind": kind, "query": _listed(query)}
        ask = wording.question.format(**place) + wording.answer_prefix.format(**place)
        questions.append(Question(ask, " " + ", ".join(answers)))
    return Document(lead + context.rstrip() + wording.after_data, questions, facts)


def variable_tracking(draw: Draw, filler: Filler, tokens: int, hops: int = 4, noise: bool = True) -> Document:
    """RULER's chain `VAR A = 12345`, `VAR B = VAR A` and so on; all variables that hold the value are asked."""
    rng = draw.rng
    names = draw.distinct(lambda: draw.variable(5), hops + 1)
    value = draw.number(5)
    facts = [f"VAR {names[0]} = {value}\n"]
    facts += [f"VAR {name} = VAR {before} \n" for before, name in pairwise(names)]
    spare = tokens - filler.count(VT.lead + "".join(facts))
    pieces = [NOISE + "\n"] * max(0, spare // filler.count(NOISE)) if noise else filler.pieces(rng, spare)
    context = VT.lead + scatter(rng, facts, pieces, in_order=True).rstrip() + VT.after_data
    place = {"query": value, "count": str(hops + 1)}
    ask = VT.question.format(**place) + VT.answer_prefix.format(**place)
    return Document(context, [Question(ask.rstrip(), " " + " ".join(names))], facts)


def common_words(draw: Draw, filler: Filler, tokens: int) -> Document:
    """RULER's numbered list in which some words come more often than the others."""
    rng = draw.rng
    common = 10 if tokens > 600 else 4
    times = 6 if tokens > 600 else 4
    words = rng.sample(list_words(), common + max(4, (tokens - common * times * 5) // 6))
    listed = words[:common] * times + words[common:]
    rng.shuffle(listed)
    context = CWE.lead + " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)) + CWE.after_data
    answer = " " + " ".join(f"{i}. {word}" for i, word in enumerate(words[:common], 1))
    ask = (CWE.question + CWE.answer_prefix).replace(" 10 ", f" {common} ")
    return Document(context, [Question(ask, answer)])


def frequent_words(draw: Draw, filler: Filler, tokens: int) -> Document:
    """RULER's coded words whose numbers fall with the square of their rank."""
    rng = draw.rng
    total = max(24, tokens // 6)
    codes = ["...", *draw.distinct(draw.code, 9)]
    listed = [code for rank, code in enumerate(codes, 1) for _ in range(max(1, int(total * rank**-2.0 / 1.645)))]
    rng.shuffle(listed)
    ask = FWE.question + FWE.answer_prefix
    return Document(FWE.lead + " ".join(listed) + FWE.after_data, [Question(ask, " " + " ".join(codes[1:4]))])


def facts_in_documents(draw: Draw, filler: Filler, tokens: int, asked: int = 8) -> Document:
    """RULER's numbered documents, which hold facts on people; questions on them."""
    rng = draw.rng
    count = max(1, min(tokens // 40, 24))
    people = draw.distinct(draw.person, count)
    room = tokens - filler.count(QA.lead)
    pieces = filler.pieces(rng, max(0, room - 14 * count))
    facts, asks = [], []
    for person in people:
        says, question, answers = rng.choice(FACTS)
        answer = rng.choice(answers.split())
        facts.append(f"{person} {says} {answer}.")
        asks.append((question.format(person), answer))
    share = -(-len(pieces) // count)
    documents = [
        f"Document {i + 1}:\n{scatter(rng, [fact], pieces[i * share : (i + 1) * share]).strip()}"
        for i, fact in enumerate(facts)
    ]
    questions = [
        Question(
            QA.question.format(query=ask) + QA.answer_prefix if i == 0 else f"Question: {ask} Answer:", f" {answer}"
        )
        for i, (ask, answer) in enumerate(rng.sample(asks, min(asked, count)))
    ]
    return Document(QA.lead + "\n\n".join(documents) + QA.after_data, questions, facts)


def repeat(draw: Draw, filler: Filler, tokens: int, plain: bool = False) -> Document:
    """Text to be repeated: all of a short one, one marked paragraph of a long one, or on from words that are given.

    Half of the texts have their words out of order, so that nothing but the context tells what comes next.
    """
    rng = draw.rng
    text = filler.text(rng, tokens).strip()
    words = text.split(" ")
    if plain and rng.random() < 0.6:
        words = rng.choices(COMMON_WORDS, k=tokens)
    if plain or rng.random() < 0.5:
        rng.shuffle(words)
    if plain or tokens <= 96:
        text = " ".join(words)
        return Document(text + "\n\n", [Question(rng.choice(("Again:", "Repeat the text above:")), " " + text)])
    span = max(8, min(len(words) // 3, 64))
    start = rng.randrange(0, max(1, len(words) - span - 6))
    if rng.random() < 0.5:
        context = " ".join(words) + "\n\n"
        begin = " ".join(words[start : start + 5])
        ask = f"Repeat the part of the text that starts with: {begin}"
        return Document(context, [Question(ask, " " + " ".join(words[start + 5 : start + 5 + span]))])
    marked = " ".join(words[start : start + span]).strip() or "nothing"
    context = " ".join((*words[:start], "\n<passage>", marked, "</passage>\n", *words[start + span :]))
    return Document(context + "\n\n", [Question("Repeat the passage:", f" {marked}")])


# -- mixtures ----------------------------------------------------------------------------------------------------------

#: Tasks by RULER's names, each `(draw, filler, tokens) -> Document` with one question: what the checks use.
TASKS: dict[str, Callable[[Draw, Filler, int], Document]] = {
    "niah_single_1": lambda draw, filler, n: niah(draw, filler, n, haystack="noise"),
    "niah_single_2": lambda draw, filler, n: niah(draw, filler, n),
    "niah_single_3": lambda draw, filler, n: niah(draw, filler, n, value_kind="uuids"),
    "niah_multikey_1": lambda draw, filler, n: niah(draw, filler, n, keys=4),
    "niah_multikey_2": lambda draw, filler, n: niah(draw, filler, n, haystack="needle"),
    "niah_multikey_3": lambda draw, filler, n: niah(
        draw, filler, n, haystack="needle", key_kind="uuids", value_kind="uuids"
    ),
    "niah_multivalue": lambda draw, filler, n: niah(draw, filler, n, values=4),
    "niah_multiquery": lambda draw, filler, n: niah(draw, filler, n, keys=4, queries=4),
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa": lambda draw, filler, n: facts_in_documents(draw, filler, n, asked=1),
    "repeat": repeat,
    "records": lambda draw, filler, n: records(draw, filler, n, most=1000, asked=1),
}


def for_training(rng: random.Random, filler: Filler, level: int) -> tuple[str, Document]:
    """A document of the curriculum's level and the name of its family."""
    draw = Draw(rng)
    tokens, most = LEVELS[level]
    chance = rng.random()
    if level < 2:
        if chance < 0.02:  # repeating is learned only once records are
            return "repeat", repeat(draw, filler, tokens, plain=True)
        return "records", records(draw, filler, tokens, most, plain=True)
    if level == 2:
        if chance < 0.15:
            return "repeat", repeat(draw, filler, tokens, plain=rng.random() < 0.5)
        return "records", records(draw, filler, tokens, most, plain=rng.random() < 0.4)
    if chance < 0.40:
        return "records", records(draw, filler, tokens, most, plain=rng.random() < 0.2)
    if chance < 0.70:
        return "niah", _any_niah(draw, filler, tokens)
    if chance < 0.82:
        return "repeat", repeat(draw, filler, tokens, plain=tokens < 400 and rng.random() < 0.3)
    if chance < 0.91:
        return "qa", facts_in_documents(draw, filler, tokens)
    if chance < 0.96 or tokens < 250:
        hops = rng.randint(1, 4)
        return "vt", variable_tracking(draw, filler, tokens, hops, noise=rng.random() < 0.7)
    counted = common_words if rng.random() < 0.5 else frequent_words
    return "counting", counted(draw, filler, tokens)


def _any_niah(draw: Draw, filler: Filler, tokens: int) -> Document:
    rng = draw.rng
    haystack = rng.choice(("essay", "noise", "needle", "needle"))
    uuids = tokens >= 320 and rng.random() < 0.25
    options: dict[str, Any] = {"haystack": haystack, "value_kind": "uuids" if uuids else "numbers"}
    shape = rng.random()
    if shape < 0.6:
        return niah(draw, filler, tokens, keys=rng.randint(1, 6), asked=4, **options)
    if shape < 0.8:
        return niah(draw, filler, tokens, keys=rng.randint(1, 2), values=rng.randint(2, 4), **options)
    queries = rng.randint(2, 4)
    return niah(draw, filler, tokens, keys=rng.randint(queries, 6), queries=queries, **options)


# -- tokens ------------------------------------------------------------------------------------------------------------


def encode(document: Document, tokenizer: Any, chat: bool = False) -> tuple[list[int], list[int]]:
    """Tokens of context, questions and answers, and marks: 0 context, 1 question, 2 answer with its end."""
    parts: list[tuple[str, int]] = [("<|im_start|>user\n" if chat else "", 0), (document.context, 0)]
    for i, question in enumerate(document.questions):
        if chat:
            opening = "" if i == 0 else "<|im_start|>user\n"
            parts.append((f"{opening}{question.text}<|im_end|>\n<|im_start|>assistant\n", 1))
            parts.append((question.answer.lstrip(" ") + "<|im_end|>\n", 2))
        else:
            parts += [(question.text, 1), (question.answer + question.end, 2)]
    encoded = tokenizer([text for text, _ in parts], add_special_tokens=False).input_ids
    ids = [token for some in encoded for token in some]
    marks = [mark for some, (_, mark) in zip(encoded, parts, strict=True) for _ in some]
    return ids, marks
