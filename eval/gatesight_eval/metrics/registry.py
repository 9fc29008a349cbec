"""Scorers by name."""

from ..suites.items import Question
from . import kvzip
from .choice import choice_eng, many_shot
from .repoqa import repoqa
from .ruler import exact_match, string_match_all, string_match_part
from .scbench import kv, kv_in_repoqa_and_kv, mf, passkey, qa_chn, qa_eng, summary, vt
from .scores import Score, Scorer

SCORERS: dict[str, Scorer] = {
    # The toy suite and RULER.
    "exact_match": exact_match,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    # SCBench; `kv` serves prefix_suffix too.
    "choice_eng": choice_eng,
    "kv": kv,
    "kv_in_repoqa_and_kv": kv_in_repoqa_and_kv,
    "many_shot": many_shot,
    "mf": mf,
    "passkey": passkey,
    "qa_chn": qa_chn,
    "qa_eng": qa_eng,
    "repoqa": repoqa,
    "summary": summary,
    "vt": vt,
    # KVzip's form of SCBench.
    "kvzip_choice_eng": kvzip.choice_eng,
    "kvzip_include": kvzip.include,
    "kvzip_many_shot": kvzip.many_shot,
    "kvzip_mf": kvzip.mf,
    "kvzip_qa_eng": kvzip.qa_eng,
    "kvzip_repoqa": kvzip.repoqa_scorer,
    "kvzip_summary": kvzip.summary,
    "kvzip_vt": kvzip.vt,
}


def score(prediction: str, question: Question) -> Score:
    """The score of a prediction by the question's own metric.

    Raises:
        ValueError: No such metric, or the question lacks what its metric reads.
        RuntimeError: The metric needs a package that is not installed.
    """
    if question.metric not in SCORERS:
        raise ValueError(f"No metric {question.metric!r}; there are {', '.join(sorted(SCORERS))}.")
    return SCORERS[question.metric](prediction, question)
