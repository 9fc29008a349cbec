"""The methods' formulas once more, for one row and one layer, in float64 and plain loops: what scorers must equal.

Nothing here is shared with the library: vectors are turned as complex numbers, groups are indexed, rows are alone.
Protected entries are infinite.
"""

import cmath
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gatesight_hf import GateSightCache, Prefill
from gatesight_hf.models import HybridSpec
from gatesight_hf.scoring import Needs, QueryMoments, Recorder

from .oracle import capture_attention
from .running import forward, padded

EVERYTHING = Needs(signals=True, queries=64, query_moments=True, hidden=True)


@dataclass
class Plain:
    """One row of n tokens in one layer, float64.

    Attributes:
        queries: `[n, heads, D]`, before RoPE.
        keys: `[n, H, D]`, before RoPE.
        values: `[n, H, D]`.
        frequencies: ω of each rotary pair (i, i + R/2); channels from R on do not turn.
        scale: Attention scaling of a scaled RoPE.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    frequencies: list[float]
    scale: float = 1.0
    rotated_keys: Tensor = field(init=False)
    rotated_queries: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.queries, self.keys, self.values = self.queries.double(), self.keys.double(), self.values.double()
        self.rotated_keys, self.rotated_queries = self.keys.clone(), self.queries.clone()
        for states in (self.rotated_keys, self.rotated_queries):
            for position in range(len(states)):
                for head in range(states.shape[1]):
                    states[position, head] = self.turned(states[position, head], position)

    def turned(self, vector: Tensor, position: int) -> Tensor:
        result, half = vector.clone(), len(self.frequencies)
        for f, omega in enumerate(self.frequencies):
            pair = complex(vector[f], vector[f + half]) * self.scale * cmath.exp(1j * omega * position)
            result[f], result[f + half] = pair.real, pair.imag
        return result

    @property
    def length(self) -> int:
        return len(self.keys)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.keys.shape[1]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.heads

    @property
    def channels(self) -> int:
        return self.keys.shape[2]

    def empty(self) -> Tensor:
        return torch.zeros(self.heads, self.length, dtype=torch.float64)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    return [power / sum(powers) for power in powers]


def snapkv(row: Plain, window: int, kernel: int, pool: str = "mean") -> Tensor:
    n, scores = row.length, row.empty()
    window = min(window, n - 1)
    seen = n - max(window, 1)
    scores[:, seen:] = math.inf
    for head in range(row.heads):
        for g in range(row.group):
            mean = [0.0] * seen
            for t in range(n - window, n):
                query = row.rotated_queries[t, head * row.group + g]
                logits = [float(query @ row.rotated_keys[i, head]) / math.sqrt(row.channels) for i in range(t + 1)]
                for i, weight in enumerate(softmax(logits)[:seen]):
                    mean[i] += weight / window
            for i in range(seen):
                near = [mean[j] if 0 <= j < seen else 0.0 for j in range(i - kernel // 2, i + kernel // 2 + 1)]
                scores[head, i] += (sum(near) / kernel if pool == "mean" else max(near)) / row.group
    return scores


def keydiff(row: Plain) -> Tensor:
    scores = row.empty()
    for head in range(row.heads):
        keys = row.rotated_keys[:, head]
        anchor = sum(key / key.norm() for key in keys) / row.length
        for i, key in enumerate(keys):
            scores[head, i] = -(key @ anchor) / (key.norm() * anchor.norm())
    return scores


def keynorm(row: Plain) -> Tensor:
    scores = row.empty()
    for head in range(row.heads):
        for i in range(row.length):
            scores[head, i] = -math.sqrt(sum(float(x) ** 2 for x in row.rotated_keys[i, head]))
    return scores


def streaming_llm(row: Plain, sinks: int) -> Tensor:
    scores = row.empty()
    for i in range(row.length):
        scores[:, i] = math.inf if i < sinks else i
    return scores


def lagkv(row: Plain, sinks: int, lag: int) -> Tensor:
    n, scores = row.length, row.empty()
    partitions = (n - sinks) // lag
    if partitions < 2:
        for i in range(n):
            scores[:, i] = math.inf if i < sinks else i / n
        return scores
    scores[:, :] = math.inf
    for head in range(row.heads):
        for p in range(partitions - 1):
            own = range(sinks + p * lag, sinks + (p + 1) * lag)
            mean = [0.0] * lag
            for states in (row.rotated_keys[:, head], row.values[:, head]):
                spreads = []
                for i in own:
                    scaled = []
                    for c in range(row.channels):
                        following = [float(states[j + lag, c]) for j in own]
                        low, high = min(following), max(following)
                        scaled.append((float(states[i, c]) - low) / (high - low) if high > low else 0.0)
                    middle = sum(scaled) / len(scaled)
                    spreads.append(math.sqrt(sum((x - middle) ** 2 for x in scaled) / (len(scaled) - 1)))
                mean = [m + weight / 2 for m, weight in zip(mean, softmax(spreads), strict=True)]
            for rank, i in enumerate(sorted(range(lag), key=lambda i: mean[i])):
                scores[head, own[i]] = rank / lag
    return scores


def expected_attention(row: Plain, future: int, epsilon: float = 0.0, value_norm: bool = True) -> Tensor:
    n, channels, half, scores = row.length, row.channels, len(row.frequencies), row.empty()
    scores[:, :4] = math.inf
    turn = torch.eye(channels, dtype=torch.float64)
    for f, omega in enumerate(row.frequencies):
        mean = sum(row.scale * cmath.exp(1j * omega * position) for position in range(n, n + future)) / future
        turn[f, f] = turn[f + half, f + half] = mean.real
        turn[f, f + half], turn[f + half, f] = -mean.imag, mean.imag
    for head in range(row.heads):
        for g in range(row.group):
            past = row.queries[4:, head * row.group + g]
            mu = sum(past) / max(len(past), 1)
            sigma = sum((torch.outer(q - mu, q - mu) for q in past), torch.zeros(channels, channels)) / max(n - 4, 1)
            logits = []
            for key in row.rotated_keys[4:, head]:
                back = turn.T @ key
                logits.append(float(mu @ back) / math.sqrt(channels) + float(back @ sigma @ back) / (2 * channels))
            for i, weight in enumerate(softmax(logits) if logits else []):
                scores[head, 4 + i] += weight / row.group
        for i in range(4, n):
            if value_norm:
                scores[head, i] = (scores[head, i] + epsilon) * row.values[i, head].norm()
    return scores


def triattention(
    row: Plain, mean: Tensor, magnitude: Tensor, nope: str, aggregation: str, offsets: tuple[int, ...]
) -> Tensor:
    """With phases φ, keys whose rotation is undone, and one cosine for each distance, as in the paper."""
    n, half = row.length, len(row.frequencies)
    mean, magnitude, scores = mean.double(), magnitude.double(), row.empty()
    for head in range(row.heads):
        best = [-math.inf] * n
        for q in range(head * row.group, (head + 1) * row.group):
            raw = []
            for p in range(n):
                key = row.keys[p, head]
                totals, rest = [0.0] * len(offsets), 0.0
                for f, omega in enumerate(row.frequencies):
                    q_mean, k = complex(mean[q, f], mean[q, f + half]), complex(key[f], key[f + half])
                    phi = cmath.phase(q_mean * k.conjugate())
                    weight = row.scale**2
                    for o, offset in enumerate(offsets):
                        angle = omega * (n + offset - p) + phi
                        totals[o] += weight * abs(q_mean) * abs(k) * math.cos(angle)
                    rest += weight * (float(magnitude[q, f]) - abs(q_mean)) * abs(k)
                for c in range(2 * half, row.channels):
                    if nope != "none":
                        rest += float(mean[q, c] * key[c])
                    if nope == "full":
                        rest += float((magnitude[q, c - half] - mean[q, c].abs()) * key[c].abs())
                raw.append((sum(totals) / len(totals) if aggregation == "mean" else max(totals)) + rest)
            middle = sum(raw) / n
            deviation = math.sqrt(sum((x - middle) ** 2 for x in raw) / n)
            best = [max(b, (x - middle) / max(deviation, 1e-6)) for b, x in zip(best, raw, strict=True)]
        scores[head] = torch.tensor(best)
    return scores


def replayed_attention(row: Plain, sinks: int, start: int, stop: int, queries: Tensor, keys: Tensor) -> Tensor:
    """KVzip's scores `[H, stop - start]` of one chunk; `queries` `[Q, heads, D]` and `keys` `[Q, H, D]` of the replay,
    with RoPE."""
    scores = torch.zeros(row.heads, stop - start, dtype=torch.float64)
    seen = [*range(min(sinks, start)), *range(start, stop)]
    for head in range(row.heads):
        for t in range(len(queries)):
            visible = [*(row.rotated_keys[i, head] for i in seen), *keys[: t + 1, head].double()]
            for g in range(row.group):
                query = queries[t, head * row.group + g].double()
                weights = softmax([float(query @ key) / math.sqrt(row.channels) for key in visible])
                for i in range(stop - start):
                    scores[head, i] = max(scores[head, i], weights[min(sinks, start) + i])
    return scores


def check_scores(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """`[H, n]` each: the same protected entries, and the same scores of all others."""
    protected = expected.isinf()
    assert torch.equal(found >= 1e30, protected)
    torch.testing.assert_close(found[~protected].double(), expected[~protected], rtol=0, atol=tolerance)


def recorded(model: object, ids: Tensor, mask: Tensor | None = None) -> tuple[Prefill, list[list[Plain]]]:
    """A prefill with everything recorded, and per layer and row what the model computed."""
    spec = HybridSpec.from_config(model.config)  # type: ignore[attr-defined]
    cache = GateSightCache(Recorder(EVERYTHING), model)
    with capture_attention(model, spec, cache) as views:
        forward(model, ids, cache, **({} if mask is None else padded(mask, ids.shape[1])))
    frequencies = model.model.rotary_emb.inv_freq.tolist()  # type: ignore[attr-defined]
    prefill = cache.prefill()
    rows = [
        [
            Plain(view.queries_before_rope[r, -n:], view.keys_before_rope[r, -n:], view.values[r, -n:], frequencies)
            for r, n in enumerate(prefill.lengths)
        ]
        for (view,) in views
    ]
    return prefill, rows


def made_prefill(rows: list[list[Plain]], group: int, dtype: torch.dtype = torch.float32, window: int = 64) -> Prefill:
    """A prefill `rows[layer][row]` with NaN for pads, and rotary tables whose angles are float64."""
    first = rows[0][0]
    spec = HybridSpec(
        "made", (0,), tuple(range(1, 1 + len(rows))), first.heads * group, first.heads, first.channels, *[1] * 4
    )
    lengths = [row.length for row in rows[0]]
    slots = max(lengths)

    def padded_rows(states: list[Tensor]) -> Tensor:
        """`[n, heads, D]` of each row -> `[B, slots, heads, D]`."""
        whole = torch.full((len(states), slots, *states[0].shape[1:]), math.nan, dtype=torch.float64)
        for r, state in enumerate(states):
            whole[r, slots - len(state) :] = state
        return whole.to(dtype)

    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.double()[:, None] * torch.tensor(first.frequencies * 2, dtype=torch.float64)
        return (angles.cos() * first.scale).float(), (angles.sin() * first.scale).float()

    moments = []
    for layer in rows:
        means, covariances = [], []
        for row in layer:
            past = row.queries[4:].transpose(0, 1)
            count = max(row.length - 4, 1)
            mean = past.sum(1) / count
            means.append(mean)
            covariances.append(past.mT @ past / count - mean[:, :, None] * mean[:, None])
        count = torch.tensor([max(0, n - 4) for n in lengths])
        moments.append(QueryMoments(count, torch.stack(means).float(), torch.stack(covariances).float()))
    return Prefill(
        spec=spec,
        lengths=lengths,
        signals=[],
        keys=[padded_rows([row.rotated_keys for row in layer]).transpose(1, 2) for layer in rows],
        values=[padded_rows([row.values for row in layer]).transpose(1, 2) for layer in rows],
        queries=[padded_rows([row.rotated_queries for row in layer])[:, -window:] for layer in rows],
        query_moments=moments,
        rotary=tables,
    )


def random_rows(
    lengths: list[int], layers: int = 1, group: int = 3, scale: float = 1.0, seed: int = 0
) -> list[list[Plain]]:
    """Per layer and row: 2 KV heads, 8 channels of which 4 turn, queries and keys that are not centred on zero."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(length: int, heads: int) -> Tensor:
        centre = torch.randn(1, heads, 8, generator=generator)
        return centre + torch.randn(length, heads, 8, generator=generator)

    return [
        [Plain(drawn(n, 2 * group), drawn(n, 2), drawn(n, 2), [1.0, 0.1], scale) for n in lengths]
        for _ in range(layers)
    ]
