"""All scorers as one `evaluate.Metric`, loaded without the Hub.

    GateSightMetric("qa_chn").compute(predictions=["贾宝玉"], references=[["贾宝玉"]])
    evaluate.load("<path of this file, or of its folder>", "qa_chn")  # the name of the file has to be the folder's

`evaluate` reads the import lines of a metric file with a pattern: one module a line, and no relative imports, because
it runs a copy of this file from another folder.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import evaluate

from gatesight_eval.metrics.registry import SCORERS, score
from gatesight_eval.suites.items import Question

_DESCRIPTION = "Official and revised scores of RULER, SCBench and the toy suite, 0 to 1, averaged over predictions."
_INPUTS = """
Args:
    predictions (`list[str]`): Answers of the model.
    references (`list[list[str]]` or `list[str]`): References of each, as the scorer reads them.
    details (`list[dict]`, optional): What `choice_eng` and `repoqa` read besides, one for each prediction.

Returns:
    `official` and `revised` (mean scores) and `unparsed_rate` (share of predictions without a recognisable answer).
"""


class GateSightMetric(evaluate.Metric):
    """The scorer that `config_name` names, a key of `SCORERS`, averaged over predictions.

    Raises:
        ValueError: No scorer has that name.
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in SCORERS:
            raise ValueError(f"config_name is one of {', '.join(sorted(SCORERS))}, got {self.config_name!r}.")
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
                datasets.Features({"predictions": text, "references": text}),
            ],
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[str | Sequence[str]],
        details: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, float]:
        details = details if details is not None else [{}] * len(predictions)
        scores = []
        for prediction, reference, extras in zip(predictions, references, details, strict=True):
            accepted = (reference,) if isinstance(reference, str) else tuple(reference)
            scores.append(score(prediction, Question("", accepted, 0, self.config_name, details=extras)))
        return {
            "official": sum(s.official for s in scores) / len(scores),
            "revised": sum(s.revised for s in scores) / len(scores),
            "unparsed_rate": sum(not s.parsed for s in scores) / len(scores),
        }
