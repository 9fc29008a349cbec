"""The closed vocabulary of the reference model: every word its documents and questions can hold."""

ADJECTIVES = "amber brave calm dusty eager frosty gentle hollow ivory jolly keen lucky mellow noble quiet rusty".split()
THINGS = "river stone falcon lantern meadow harbor violin castle comet orchid anchor saddle".split()

#: Keys of the magic numbers. One token each, so that a key and its first digit fit one convolution window.
MAGIC_WORDS = [f"{adjective}-{thing}" for adjective in ADJECTIVES for thing in THINGS]
DIGITS = list("0123456789")
NAMES = (
    "alice bruno carla diego elena felix greta hugo irene jonas karin lukas maria niels olivia pedro "
    "quinn rosa simon tessa ursula victor wanda xavier yasmin zoltan astrid boris celia dario edith fabio"
).split()
CITIES = (
    "paris london berlin madrid rome vienna prague oslo lisbon athens dublin warsaw cairo lima quito tokyo "
    "seoul delhi sydney boston denver austin geneva milan turin porto bergen malmo zagreb riga tallinn kyoto"
).split()
VARIABLES = [f"x{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"] + [f"y{letter}" for letter in "abcdefghijkl"]

FILLER_NOUNS = (
    "farmer teacher sailor doctor child neighbor painter merchant dog horse bird cat garden house road bridge "
    "market forest village kitchen window table letter basket wagon boat hill valley church school"
).split()
FILLER_ADJECTIVES = (
    "old young tall small red blue heavy light warm cold busy happy tired clever narrow wide bright dark long short"
).split()
FILLER_VERBS = (
    "sees follows visits paints carries passes watches finds leaves reaches mends opens cleans likes remembers"
).split()
FILLER_TIMES = "today yesterday often sometimes later again soon never always slowly".split()
FILLER_PLACES = "near behind beside under above beyond".split()

#: Words of the fixed templates: needles, facts, chains, questions, copying and RULER's noise sentence.
TEMPLATE_WORDS = (
    ". , : ; ? = and is are the a of in for to all one special magic number numbers what where does live lives "
    "value var variables assigned find question answer repeat previous context exactly part starting with "
    "mentioned provided text that grass green sky sun yellow here we go there back"
).split()

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
SPECIAL_TOKENS = [PAD, UNKNOWN, END]


def vocabulary() -> list[str]:
    """All tokens in id order, each once."""
    groups = [
        SPECIAL_TOKENS, DIGITS, TEMPLATE_WORDS, MAGIC_WORDS, NAMES, CITIES, VARIABLES,
        FILLER_NOUNS, FILLER_ADJECTIVES, FILLER_VERBS, FILLER_TIMES, FILLER_PLACES,
    ]  # fmt: skip
    return list(dict.fromkeys(word for group in groups for word in group))
