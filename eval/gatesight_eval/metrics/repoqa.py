"""The scorer of RepoQA (arXiv 2406.06025) as SCBench uses it: which of a repository's functions was repeated?"""

import re
from collections.abc import Sequence
from typing import Any

from ..suites.items import Question
from .scores import Score, detail

#: BLEU from which on a function counts as repeated.
THRESHOLD = 0.8
#: The node of tree-sitter's grammar that is a function.
FUNCTION_NODES = {
    "cpp": "function_definition",
    "go": "function_declaration",
    "java": "method_declaration",
    "python": "function_definition",
    "rust": "function_item",
    "typescript": "function_declaration",
}
_CODE_BLOCK = re.compile(r"^```\w*\s*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def repoqa(prediction: str, question: Question) -> Score:
    """1 if the function asked for is the most similar of its repository's and similar by at least 0.8.

    Reads details: "lang", "name" of the function, "needles" and "evaluated_needles", lists of [name, code]. Fault: the
    official needles are those of the rows and turns that were evaluated, so that the score changes with their number;
    revised: all of the repository's. `parsed` says whether there is a code block; without one the whole text counts.

    Raises:
        ValueError: Another language than those of RepoQA.
        RuntimeError: A package is missing.
    """
    name, language = detail(question, "name"), detail(question, "lang")
    code, parsed = extract_function(prediction, language)
    official, revised = (
        best_match(code, detail(question, needles), name) for needles in ("evaluated_needles", "needles")
    )
    return Score(float(official), float(revised), parsed)


def extract_function(prediction: str, language: str) -> tuple[str, bool]:
    """The first function in a prediction's code blocks, and whether there are any.

    Without a function it is the first block; without a closed block the whole text.
    """
    blocks: list[str] = _CODE_BLOCK.findall(prediction.strip())
    if not blocks:
        return prediction.strip(), False
    parser = _parser(language)
    for block in blocks:
        source = block.encode()
        node = _first_function(parser.parse(source).root_node, language)
        if node is not None:
            return source[node.start_byte : node.end_byte].decode(), True
    return blocks[0], True


def best_match(code: str, needles: Sequence[Sequence[str]], name: str) -> bool:
    """Whether the most similar of the needles ([name, code] each) is the one of that name, and similar enough."""
    similarities = [(bleu(code, needle), owner) for owner, needle in needles]
    best, owner = max(similarities, key=lambda pair: pair[0])  # the first of equals, as the official scorer
    return owner == name and best >= THRESHOLD


def bleu(candidate: str, reference: str) -> float:
    """BLEU-4 of words between white space, smoothed by method 4 of Chen and Cherry (2014).

    Raises:
        RuntimeError: `nltk` is not installed.
    """
    try:
        from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    except ImportError as error:
        raise RuntimeError("BLEU needs the package nltk: pip install 'gatesight-hf[eval]'.") from error
    smooth = SmoothingFunction().method4
    return float(sentence_bleu([reference.split()], candidate.split(), smoothing_function=smooth))


def _parser(language: Any) -> Any:  # str; some releases of the grammars annotate a Literal of all names
    if language not in FUNCTION_NODES:
        raise ValueError(f"RepoQA knows the languages {', '.join(FUNCTION_NODES)}, not {language!r}.")
    mend = "RepoQA needs tree-sitter and its grammars: pip install tree-sitter 'tree-sitter-language-pack<1'."
    try:
        import tree_sitter
        from tree_sitter_language_pack import get_language
    except ImportError as error:
        raise RuntimeError(mend) from error
    try:
        return tree_sitter.Parser(get_language(language))
    except Exception as error:  # releases from 1 on fetch the grammar here; what they raise depends on the release
        raise RuntimeError(f"{mend} Newer releases download grammars at run time, which failed: {error}") from error


def _first_function(root: Any, language: str) -> Any:
    """The first function in the text under a node of a syntax tree, or None."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node.type == FUNCTION_NODES[language] and (language != "cpp" or _is_plain_cpp_function(node)):
            return node
        stack.extend(reversed(node.children))
    return None


def _is_plain_cpp_function(node: Any) -> bool:
    """RepoQA leaves out members defined outside of their class, operators and functions that return pointers."""
    declarator = node.child_by_field_name("declarator")
    if declarator is None or declarator.type != "function_declarator":
        return False
    named = declarator.child_by_field_name("declarator")
    return named is not None and named.type == "identifier"
