"""How many KV entries each attention layer keeps. Pure functions of lengths, gates and the kept fraction.

As in the GateSight paper, the model-wide number of kept entries is p · (context entries outside the
protected prefix), the same for every allocation; a layer's share is proportional to its mean output gate.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

from gatesight_kernels.checks import check_whole_number, described

Allocation = Literal["gate", "flat", "pyramid", "score", "head", "global"]
ALLOCATIONS: tuple[str, ...] = get_args(Allocation)
#: Those that give each layer a share before scores are known, which all its heads keep.
SHARED = ALLOCATIONS[:3]
#: Those whose shares are in proportion to mean output gates.
BY_GATES = frozenset({"gate", "head"})
#: Those with which heads of a layer keep different numbers of entries.
BY_HEADS = frozenset({"head", "global"})

#: PyramidKV's β (arXiv 2406.02069): the last layer's budget is the mean divided by it.
PYRAMID_BETA = 20


def check_kept_fraction(kept_fraction: float) -> float:
    """Return the kept fraction as a float.

    Raises:
        ValueError: Not a number in (0, 1].
    """
    if isinstance(kept_fraction, bool) or not isinstance(kept_fraction, (int, float)) or not 0 < kept_fraction <= 1:
        raise ValueError(
            f"kept_fraction must be in (0, 1], got {described(kept_fraction)}: it is the share of the context's KV "
            "entries that stays (0.1 keeps a tenth; 1.0 keeps all)."
        )
    return float(kept_fraction)


def check_allocation(allocation: str) -> None:
    """Raises ValueError unless `allocation` is one of `ALLOCATIONS`."""
    if not isinstance(allocation, str) or allocation not in ALLOCATIONS:
        raise ValueError(f"allocation must be one of {', '.join(ALLOCATIONS)}, got {described(allocation)}.")


def check_gate_exponent(exponent: float) -> None:
    """Raises ValueError unless the exponent is a finite number >= 0."""
    if isinstance(exponent, bool) or not isinstance(exponent, (int, float)) or not 0 <= exponent < math.inf:
        raise ValueError(
            f"gate_exponent must be a finite number of 0 or more, got {described(exponent)} (0 is flat, 1 the paper's)."
        )


def total_budget(kept_fraction: float, length: int, layers: int) -> int:
    """Entries per KV head that all layers together keep of `length` evictable tokens: round(p · layers · length).

    At least one per layer, so that no layer is left empty, and never more than there are.
    """
    exact = kept_fraction * layers * length
    # A product such as 0.35 * 10 falls just below its half-integer; the nudge is far below one part of the budget.
    return min(layers * length, max(min(layers, layers * length), math.floor(exact + 0.5 + 1e-9)))


def layer_weights(
    allocation: str, layers: int, gate_means: Sequence[float] | None, gate_exponent: float = 1.0
) -> list[float]:
    """Unnormalised share of each layer.

    Args:
        allocation: `gate`: the mean output gate to the power of `gate_exponent`. `flat`: equal.
            `pyramid`: PyramidKV's arithmetic sequence from (2 - 1/β) down to 1/β times the mean.
            Which is best depends on the model: `pyramid` beats `gate` on the bundled one, of two attention layers.
        layers: L.
        gate_means: Mean of sigmoid(gate) over tokens and channels for each layer; only read by `gate`.
        gate_exponent: Likewise.

    Raises:
        ValueError: Unknown allocation, `gate` without a positive mean for each layer, or one that gives layers no share
            before scores are known.
    """
    check_allocation(allocation)
    if allocation not in SHARED:
        raise ValueError(f"allocation={allocation!r} gives layers no shares before scores are known.")
    if allocation == "flat" or layers == 1:
        return [1.0] * layers
    if allocation == "pyramid":
        last = 1 / PYRAMID_BETA
        first = 2 - last
        return [first - j * (first - last) / (layers - 1) for j in range(layers)]
    of_layers = gate_means if isinstance(gate_means, (list, tuple)) else []
    if len(of_layers) != layers or not all(isinstance(g, (int, float)) and 0 < g < math.inf for g in of_layers):
        raise ValueError(
            f"allocation='gate' needs gate_means, a positive mean output gate for each of {layers} attention layers, "
            f"got {described(gate_means)}; use allocation='flat' for a model without output gates."
        )
    largest = max(of_layers)  # large exponents would leave the range of numbers
    return [(g / largest) ** gate_exponent for g in of_layers]


def allocate(
    kept_fraction: float,
    length: int,
    layers: int,
    *,
    allocation: str = "gate",
    gate_means: Sequence[float] | None = None,
    gate_exponent: float = 1.0,
    block_size: int = 1,
    protected: int = 0,
) -> list[int]:
    """Entries that each KV head of each layer keeps of `length` evictable tokens.

    Shares are capped at `length`; what a capped layer cannot take goes to the others in proportion to their weights.
    The integers sum to `total_budget` exactly. With `block_size` > 1 (paged engines) each is then raised until it fills
    whole blocks together with the protected entries: the fewest blocks that hold both, so that only a layer that keeps
    everything may end within a block. The sum is then larger, by less than a block per layer.

    Args:
        kept_fraction: p in (0, 1].
        length: Context tokens that are not protected.
        layers: L, number of attention layers.
        allocation: See `layer_weights`.
        gate_means, gate_exponent: See `layer_weights`.
        block_size: Entries per block.
        protected: Context tokens that always stay and are not counted; read by the rounding alone.

    Returns:
        L integers in [1, length] (all 0 if `length` is 0), protected entries not included.

    Raises:
        ValueError: Kept fraction outside (0, 1], a size below its range, unknown allocation.
    """
    check_kept_fraction(kept_fraction)
    check_gate_exponent(gate_exponent)
    sizes = (("length", length, 0), ("layers", layers, 1), ("block_size", block_size, 1), ("protected", protected, 0))
    for name, value, least in sizes:
        check_whole_number(name, value, least)
    weights = layer_weights(allocation, layers, gate_means, gate_exponent)
    if length == 0:
        return [0] * layers
    return spread(total_budget(kept_fraction, length, layers), weights, length, block_size, protected)


def spread(total: int, weights: Sequence[float], length: int, block_size: int = 1, protected: int = 0) -> list[int]:
    """`total` entries over layers in proportion to `weights`, at least 1 and at most `length` each.

    Args:
        total: Entries per KV head of all layers together.
        weights: Of each layer, not negative; not all 0.
        length: See `allocate`.
        block_size, protected: Likewise.
    """
    # A layer without any weight gets its one entry, where a scale would be infinite.
    least = 1e-6 * sum(weights)
    kept = _round_to_sum(_bounded_shares(total, [max(w, least) for w in weights], length), total, length)
    return [min(length, -(-(protected + k) // block_size) * block_size - protected) for k in kept]


def _bounded_shares(total: int, weights: Sequence[float], length: int) -> list[float]:
    """clamp(λ·w, 1, length) for the λ at which the sum is `total`, found by bisection (the sum is monotone in λ)."""

    def shares(scale: float) -> list[float]:
        return [min(float(length), max(1.0, scale * w)) for w in weights]

    low, high = 0.0, (length + 1) / min(weights)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < total else (low, middle)
    return shares(high)


def _round_to_sum(shares: Sequence[float], total: int, length: int) -> list[int]:
    """Largest-remainder rounding within [1, length]; ties go to the lower layer."""
    kept = [min(length, max(1, math.floor(share + 1e-6))) for share in shares]
    by_remainder = sorted(range(len(kept)), key=lambda j: (kept[j] - shares[j], j))
    while (missing := total - sum(kept)) != 0:
        for j in by_remainder if missing > 0 else reversed(by_remainder):
            step = 1 if missing > 0 else -1
            if 1 <= kept[j] + step <= length:
                kept[j] += step
                missing -= step
                if missing == 0:
                    break
    return kept
