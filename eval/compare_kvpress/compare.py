"""Are the methods the same as elsewhere? This library's scorers on the tensors that kvpress and TriAttention scored.

Reads what `dump_kvpress.py` and `dump_triattention.py` wrote in an environment of their own, makes a `Prefill` of it,
and runs the scorers as they are. Writes OUT.json and OUT.md; exits with 1 if a float32 dump differs by more than the
tolerance.

    python eval/compare_kvpress/compare.py --out eval/results/kvpress_comparison \\
        --dump kvpress-dump kvpress-dump/yarn kvpress-dump/bf16
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

import gatesight_hf
from gatesight_hf.compaction import select, select_global
from gatesight_hf.entries import AttentionView
from gatesight_hf.methods import ExpectedAttention, KeyDiff, KeyNorm, KVzip, LagKV, SnapKV, StreamingLLM, TriAttention
from gatesight_hf.methods.base import PROTECTED, protect
from gatesight_hf.methods.kvzip import replay_scores
from gatesight_hf.models import HybridSpec
from gatesight_hf.scoring import Needs, Prefill, Recording, Scorer

#: Largest difference that passes in float32, as a share of the largest score.
TOLERANCE = 1e-5
#: Distances of up to 65,536 tokens are float32 angles on both sides, each off by up to 4e-3 rad; the mean over 17
#: distances leaves a tenth of that.
TRIATTENTION_TOLERANCES = {"mean": 1e-3, "max": 1e-2}
KVZIP_SINKS = 4

NOTES = f"""\
Compared on one context of {{tokens}} tokens in a random Qwen3 model of {{layers}} layers, {{query_heads}} query and
{{kv_heads}} KV heads. A cell is the largest absolute difference of a score, and in brackets that divided by the largest
score, over all entries that no side protects; then the share of the entries kept at a ratio of 1/2 that are the same on
both sides. float32 must agree to {TOLERANCE:g} (TriAttention: {TRIATTENTION_TOLERANCES["mean"]:g} mean,
{TRIATTENTION_TOLERANCES["max"]:g} max, relative); bfloat16 is shown as it is.

Protected entries (sinks, windows) are compared as sets, and are the same unless a row says otherwise: kvpress gives
them the highest score plus one, here they are ranked among themselves, so that a budget below their number is defined.

Different on purpose:

- Scores are float32 whatever the model's dtype. kvpress computes most of them in the model's dtype, and some softmaxes
  too; that is the difference in bfloat16. LagKV's ranks jump where scores are near each other.
- LagKV leaves out a channel that is constant in the next partition, where kvpress divides by zero. Its equal ranks of
  different partitions are ties, so that kept sets are not compared.
- StreamingLLM, and LagKV where the context is too short for it, are compared as kept sets alone: both rate by position,
  on different scales (StreamingLLM in kvpress with 0 or 1, by the ratio).
- KVzip here has no prefix of the chat template that is left out of the repetition: what the context is, is repeated.
  Scores are those of its function on the replays of kvpress, and the inputs of the replays are compared as token ids.
- TriAttention's scores are compared after its standardisation and the maximum of the group. Its authors undo RoPE of
  the keys in the model's dtype; here nothing is undone, since a key's own rotation is part of the angle. In float32
  both sides hold angles of up to 65,836 rad to 4e-3 rad only.
- Not here: `use_covariance=False`, `cross_scoring=True`, KVzip+.
"""


@dataclass(frozen=True)
class Dump:
    """What was written elsewhere for one model."""

    folder: Path
    tensors: dict[str, Tensor]
    description: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Dump":
        return cls(folder, load_file(folder / "kvpress.safetensors"), json.loads((folder / "kvpress.json").read_text()))

    @property
    def name(self) -> str:
        return self.description["dtype"] + (", YaRN" if self.description["yarn"] else "")

    @property
    def sizes(self) -> dict[str, int]:
        return self.description["sizes"]

    def layers(self, name: str) -> list[Tensor]:
        return [self.tensors[f"layers.{i}.{name}"] for i in range(self.sizes["layers"])]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As transformers computes it, in float32."""
        angles = positions.float()[:, None] * self.tensors["rope.inv_freq"].repeat(2)
        scaling = self.tensors["rope.attention_scaling"]
        return angles.cos() * scaling, angles.sin() * scaling

    @property
    def spec(self) -> HybridSpec:
        """Of a model without GDN layers, which no scorer here reads."""
        sizes = self.sizes
        heads = (sizes["query_heads"], sizes["kv_heads"], sizes["head_dim"])
        return HybridSpec("qwen3", (), tuple(range(sizes["layers"])), *heads, 0, 0, 0, 0)

    def prefill(self, needs: Needs) -> Prefill:
        """With queries and their moments recorded as in a real prefill; RoPE is this library's."""
        recording = Recording(self.spec, needs)
        cos, sin = (self.tensors[f"rope.{name}"].unsqueeze(0) for name in ("cos", "sin"))
        keys, values = self.layers("keys"), self.layers("values")
        for i, (hidden, queries) in enumerate(zip(self.layers("hidden"), self.layers("queries_pre_rope"), strict=True)):
            queries = queries.transpose(1, 2)
            # The recording reads neither keys nor values, and a plain model has no gates.
            nothing = torch.zeros_like(queries)
            recording.add_attention(i, AttentionView(hidden, queries, nothing, nothing, nothing, cos, sin), 0, None)
        return Prefill(
            spec=self.spec,
            lengths=[self.sizes["tokens"]],
            signals=[],
            keys=keys,
            values=values,
            queries=recording.queries,
            query_moments=recording.query_moments,
            rotary=self.rotary,
        )


@dataclass(frozen=True)
class Comparison:
    """One method on one dump.

    Attributes:
        ours, theirs: What was compared, in words.
        dump: Name of the dump.
        absolute, relative: Largest difference of scores, and as a share of the largest; None if only sets compare.
        protected: Whether the same entries are protected.
        kept: Share of the kept entries that are the same; None if ties decide.
        passed: None in dumps that are not float32, which need not agree.
    """

    ours: str
    theirs: str
    dump: str
    absolute: float | None
    relative: float | None
    protected: bool
    kept: float | None
    passed: bool | None


def top_half(scores: list[Tensor], dump: Dump) -> Tensor:
    """`[L, H, T]`, bool: what this library keeps of each head at a ratio of 1/2."""
    tokens = dump.sizes["tokens"]
    kept = [torch.zeros_like(of_layer[0], dtype=torch.bool) for of_layer in scores]
    for mask, of_layer in zip(kept, scores, strict=True):
        mask.scatter_(-1, select(of_layer, [tokens // 2], [tokens])[0][0], True)
    return torch.stack(kept)


def highest(scores: Tensor, count: int) -> Tensor:
    """`[L, H, T]`, bool: what kvpress keeps by scores of `[L, H, T]`."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count).indices, True)


def overlap(ours: Tensor, theirs: Tensor) -> float:
    return (int((ours & theirs).sum()) / int(theirs.sum())) if theirs.any() else 1.0


def compared(
    ours: str,
    theirs: str,
    dump: Dump,
    found: Tensor,
    expected: Tensor,
    protected: Tensor,
    kept: float | None,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Scores `[L, H, T]` of both sides; `protected`: those that the other side protects."""
    free = ~protected & (found < PROTECTED)
    absolute = float((found.double() - expected.double())[free].abs().max())
    relative = absolute / float(expected[free].double().abs().max())
    same = torch.equal(found >= PROTECTED, protected)
    passed = (same and relative <= tolerance) if dump.description["dtype"] == "float32" else None
    return Comparison(ours, theirs, dump.name, absolute, relative, same, kept, passed)


#: Name of the scores in the dump: the scorer here, whether some entries are protected, whether kept sets have no ties.
SCORED: dict[str, tuple[Scorer, bool, bool]] = {
    "snapkv": (SnapKV(window=64, kernel=5), True, True),
    "snapkv_w16_k7": (SnapKV(window=16, kernel=7), True, True),
    "keydiff": (KeyDiff(), False, True),
    "knorm": (KeyNorm(), False, True),
    "expected_attention": (ExpectedAttention(), True, True),
    "expected_attention_e2": (ExpectedAttention(epsilon=1e-2), True, True),
    "expected_attention_no_vnorm": (ExpectedAttention(value_norm=False), True, True),
    "lagkv": (LagKV(), True, False),
    "lagkv_l32": (LagKV(lag=32), True, False),
}
#: Compared as kept sets alone.
KEPT: dict[str, Scorer] = {"streaming_llm": StreamingLLM(), "lagkv_too_short": LagKV(lag=160)}


def options_of(dump: Dump, press: str) -> str:
    """Class and parameters of a press, without the ratio."""
    of_press = dump.description["presses"][press]
    options = {name: value for name, value in of_press["parameters"].items() if name != "compression_ratio"}
    return f"{of_press['class']}({', '.join(f'{name}={value}' for name, value in options.items())})"


def compare_scorers(dump: Dump) -> list[Comparison]:
    """Methods that rate a prefill."""
    prefill, rows = dump.prefill(Needs(queries=64, query_moments=True)), []
    for press, (scorer, protects, distinct) in SCORED.items():
        scores = scorer.score(prefill)
        found, expected = torch.cat(scores), dump.tensors[f"scores.{press}"][:, 0]
        protected = (expected == expected.amax((1, 2), keepdim=True)) if protects else torch.zeros_like(found).bool()
        half = dump.sizes["tokens"] // 2
        kept = overlap(top_half(scores, dump), highest(expected, half)) if distinct else None
        rows.append(compared(repr(scorer), options_of(dump, press), dump, found, expected, protected, kept))
    for press, scorer in KEPT.items():
        half = dump.description["presses"][press]["kept_per_head"][0]
        kept = overlap(
            top_half(scorer.score(prefill), dump), highest(dump.tensors[f"scores.{press}"][:, 0].float(), half)
        )
        passed = (kept == 1.0) if dump.description["dtype"] == "float32" else None
        rows.append(Comparison(repr(scorer), options_of(dump, press), dump.name, None, None, True, kept, passed))
    return rows


def compare_kvzip(dump: Dump) -> list[Comparison]:
    """KVzip's scores of the dumped replays, and the inputs of the replays."""
    rows, sizes = [], dump.sizes
    for press in ("kvzip", "kvzip_plain", "kvzip_one_chunk"):
        of_press = dump.description["presses"][press]
        layerwise = of_press["parameters"]["layerwise"]
        expected, theirs = dump.tensors[f"scores.{press}"][:, 0], dump.tensors[f"kept.{press}"][:, 0]
        found = torch.zeros(sizes["layers"], sizes["kv_heads"], sizes["tokens"])
        for c in range(of_press["chunks"]):
            chunk = f"{press}.chunks.{c}"
            start, stop = dump.tensors[f"{chunk}.bounds"].tolist()
            for i, keys in enumerate(dump.layers("keys")):
                queries, replay = (dump.tensors[f"{chunk}.{i}.{name}"][0] for name in ("queries", "keys"))
                found[i, :, start:stop] = replay_scores(
                    queries.transpose(0, 1),
                    keys[0, :, : min(KVZIP_SINKS, start)],
                    keys[0, :, start:stop],
                    replay,
                    sizes["head_dim"] ** -0.5,
                )
        scores = [protect(of_layer, first=KVZIP_SINKS).unsqueeze(0) for of_layer in found]
        # The layers of kvpress compete with each other unless it is told otherwise; heads always do.
        ours = torch.zeros_like(theirs)
        for group in [[i] for i in range(sizes["layers"])] if layerwise else [list(range(sizes["layers"]))]:
            total = int(theirs[group].sum())
            chosen = select_global([scores[i] for i in group], [total], [sizes["tokens"]])
            for i, (indices, valid) in zip(group, chosen, strict=True):
                for head in range(sizes["kv_heads"]):
                    ours[i, head, indices[0, head, valid[0, head]]] = True
        protected = torch.zeros_like(theirs)
        protected[..., :KVZIP_SINKS] = True
        result = compared(
            f"replay_scores, chunks of {of_press['parameters']['chunk_size']}",
            options_of(dump, press),
            dump,
            torch.cat(scores),
            expected,
            protected,
            overlap(ours, theirs),
        )
        rows.append(result if same_replays(dump, press) else fail(result))
    return rows


def same_replays(dump: Dump, press: str) -> bool:
    """Whether this library would replay the same tokens."""
    of_press = dump.description["presses"][press]
    tokenizer = AutoTokenizer.from_pretrained(dump.folder / of_press["tokenizer"])
    suffix = tokenizer.decode(dump.tensors[f"{press}.suffix_ids"][0])
    assert isinstance(suffix, str)
    scorer = KVzip(None, tokenizer, chunk=of_press["parameters"]["chunk_size"], suffix=suffix)
    context = dump.tensors["input_ids"][0, of_press["prefix_length"] :]
    starts = range(0, len(context), scorer.chunk)
    ours = [
        torch.cat([scorer._prompt(context, start), context[start : start + scorer.chunk]]).tolist() for start in starts
    ]
    theirs = [dump.tensors[f"{press}.chunks.{c}.replay_ids"][0].tolist() for c in range(of_press["chunks"])]
    return ours == theirs


def fail(comparison: Comparison) -> Comparison:
    return Comparison(**{**vars(comparison), "passed": False})


def compare_triattention(dump: Dump) -> list[Comparison]:
    """The authors' scores, standardised for each query head, the largest of the group."""
    tensors, heads = load_file(dump.folder / "triattention.safetensors"), dump.sizes["kv_heads"]
    real, imaginary, magnitude = (tensors[f"stats.{name}"] for name in ("q_mean_real", "q_mean_imag", "q_abs_mean"))
    mean = torch.cat([real, imaginary], dim=-1)
    statistics = [{"mean": m, "magnitude": a} for m, a in zip(mean, magnitude, strict=True)]
    prefill, rows = dump.prefill(Needs()), []
    aggregations: tuple[Literal["mean", "max"], ...] = ("mean", "max")
    for aggregation in aggregations:
        scorer = TriAttention(statistics, dump.spec.fingerprint, aggregation=aggregation)
        scorer.check(dump.spec)
        scores = scorer.score(prefill)
        raw = tensors[f"scores.{aggregation}"].double()
        centred = raw - raw.mean(-1, keepdim=True)
        expected = (centred / raw.std(-1, correction=0, keepdim=True)).unflatten(1, (heads, -1)).amax(2)
        theirs = tensors["kept.per_layer_head"] if aggregation == "mean" else highest(expected, raw.shape[-1] // 2)
        result = compared(
            f"TriAttention(aggregation={aggregation!r})",
            f"TriAttention(score_aggregation={aggregation!r}, per_layer_perhead_pruning=True)",
            dump,
            torch.cat(scores),
            expected,
            torch.zeros_like(expected, dtype=torch.bool),
            overlap(top_half(scores, dump), theirs),
            TRIATTENTION_TOLERANCES[aggregation],
        )
        rows.append(result)
    return rows


def table(rows: list[Comparison], dumps: list[str]) -> str:
    """A row for each method, a column for each dump."""
    lines = [f"| here | there | {' | '.join(dumps)} |", "|---|---|" + "---|" * len(dumps)]
    for pair in dict.fromkeys((row.ours, row.theirs) for row in rows):
        cells = []
        for name in dumps:
            (row,) = [row for row in rows if (row.ours, row.theirs, row.dump) == (*pair, name)]
            cell = "" if row.absolute is None else f"{row.absolute:.1e} ({row.relative:.1e})"
            cell += "" if row.kept is None else f"{', ' if cell else ''}kept {row.kept:.1%}"
            cell += "" if row.protected else ", other entries protected"
            cells.append(cell + (", **FAILED**" if row.passed is False else ""))
        lines.append(f"| `{pair[0]}` | `{pair[1]}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path, nargs="+", required=True, help="folders of dump_kvpress.py")
    parser.add_argument("--out", type=Path, required=True, help="path of the result, without suffix")
    args = parser.parse_args()

    rows, dumps = [], [Dump.read(folder) for folder in args.dump]
    for dump in dumps:
        rows += [*compare_scorers(dump), *compare_kvzip(dump), *compare_triattention(dump)]
    passed = not any(row.passed is False for row in rows)
    versions = {
        "here": {
            "gatesight_hf": gatesight_hf.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "there": dumps[0].description["versions"],
    }
    result = {
        "what": "largest differences between this library's scores and those of kvpress and TriAttention",
        "passed": passed,
        "tolerance": {"float32, relative": TOLERANCE, "TriAttention": TRIATTENTION_TOLERANCES},
        "versions": versions,
        "sizes": dumps[0].sizes,
        "rows": [vars(row) for row in rows],
    }
    sides = [f"{side}: {', '.join(f'{name} {v}' for name, v in names.items())}" for side, names in versions.items()]
    cells = table(rows, [dump.name for dump in dumps])
    text = f"{cells}\n\n{NOTES.format(**dumps[0].sizes)}\nVersions {'; '.join(sides)}.\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
