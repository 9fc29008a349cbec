"""What parents' prefills show of themselves in vLLM: GDN signals and mean output gates, chunk by chunk, row by row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models.utils import extract_layer_index

from gatesight_kernels import gate_means

from ..models.hybrid import HybridSpec


@dataclass
class Recorded:
    """Of one parent so far.

    Attributes:
        signals: Per GDN ordinal, chunks `[n, 3, HV]`.
        gate_sums: Per attention ordinal, the sum over tokens of their mean output gate.
        tokens: Seen.
    """

    signals: list[list[Tensor]]
    gate_sums: list[float]
    tokens: int = 0


@dataclass(frozen=True)
class Rows:
    """Tokens of one parent in a packed batch: `start … stop - 1`."""

    request_id: str
    start: int
    stop: int


class Recorder:
    """Hooks on the model's GDN and attention layers; they do nothing in steps without parents.

    Args:
        spec: Layout of the model.
        order: Request ids in the order of the batch, once its forward has begun.
    """

    def __init__(self, spec: HybridSpec, order: Callable[[], Sequence[str]]) -> None:
        self.spec = spec
        self.of: dict[str, Recorded] = {}
        self._order = order
        self._parents: list[str] = []
        self._scheduled: dict[str, int] = {}
        self._rows: list[Rows] | None = None
        self._ba: dict[int, Tensor] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attach(self, model: nn.Module) -> None:
        """Put the hooks on.

        Raises:
            RuntimeError: The model has other layers than its configuration says.
        """
        gdn = {extract_layer_index(m.prefix): m for m in model.modules() if isinstance(m, QwenGatedDeltaNetAttention)}
        modules: list[Any] = [m for m in model.modules() if hasattr(m, "attn_output_gate") and hasattr(m, "qkv_proj")]
        attention = {extract_layer_index(m.attn.layer_name): m for m in modules}
        if tuple(sorted(gdn)) != self.spec.gdn_layers or tuple(sorted(attention)) != self.spec.attention_layers:
            raise RuntimeError(
                f"vLLM's model has GDN layers {sorted(gdn)} and attention layers {sorted(attention)}; expected "
                f"{self.spec.describe()}."
            )
        for i, index in enumerate(self.spec.gdn_layers):
            layer: Any = gdn[index]
            layer.in_proj_ba.register_forward_hook(partial(self._keep_ba, i))
            layer.register_forward_hook(partial(self._after_gdn, i))
            # Called with the values after their convolution, for decodes first and then for prefills.
            layer.rearrange_mixed_qkv = partial(self._keep_values, i, layer.rearrange_mixed_qkv)
        for j, index in enumerate(self.spec.attention_layers):
            attention[index].qkv_proj.register_forward_hook(partial(self._after_qkv, j, attention[index]))

    def begin(self, parents: list[str], scheduled: dict[str, int]) -> None:
        """Called before each forward with the requests to record, and the tokens of all requests."""
        self._parents, self._scheduled, self._rows = parents, scheduled, None
        for request_id in parents:
            if request_id not in self.of:
                layers = self.spec.num_attention_layers
                self.of[request_id] = Recorded([[] for _ in self.spec.gdn_layers], [0.0] * layers)

    def end(self) -> None:
        """Called after each forward."""
        for request_id in self._parents:
            self.of[request_id].tokens += self._scheduled[request_id]
        self._parents = []

    @property
    def rows(self) -> list[Rows]:
        """Where the parents are in the batch, which is in order only when the forward runs."""
        if not self._parents:
            return []
        if self._rows is None:
            order = [request_id for request_id in self._order() if request_id in self._scheduled]
            stops = list(accumulate(self._scheduled[request_id] for request_id in order))
            starts = [0, *stops[:-1]]
            spans = zip(order, starts, stops, strict=True)
            self._rows = [Rows(name, start, stop) for name, start, stop in spans if name in self._parents]
        return self._rows

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _keep_ba(self, gdn: int, module: nn.Module, args: Any, output: Any) -> None:
        if self.rows:
            self._ba[gdn] = output[0]

    def _keep_values(self, gdn: int, plain: Any, mixed_qkv: Tensor) -> Any:
        query, key, value = plain(mixed_qkv)
        if self.rows and value is not None:
            self._values.setdefault(gdn, []).append(value[0])
        return query, key, value

    def _after_gdn(self, gdn: int, layer: Any, args: Any, output: Any) -> None:
        if not self.rows:
            return
        ba, parts = self._ba.pop(gdn), self._values.pop(gdn)
        values = torch.cat(parts)  # [tokens, HV, D]
        if layer.gqa_interleaved_layout:  # [b | a] of each key head
            b, a = (part.flatten(1) for part in ba.unflatten(-1, (layer.num_k_heads, 2, -1)).unbind(-2))
        else:
            b, a = ba.chunk(2, dim=-1)
        for one in self.rows:
            rows = slice(one.start, one.stop)
            decay = -layer.A_log.float().exp() * F.softplus(a[rows].float() + layer.dt_bias.float())
            magnitude = values[rows].float().norm(dim=-1)
            signals = torch.stack([b[rows].float().sigmoid(), decay, magnitude], dim=1)
            self.of[one.request_id].signals[gdn].append(signals.to(values.dtype))

    def _after_qkv(self, ordinal: int, attention: Any, module: nn.Module, args: Any, output: Any) -> None:
        if not self.rows or not attention.attn_output_gate:
            return
        size = 2 * attention.num_heads * attention.head_dim
        gate = output[0][:, :size].unflatten(-1, (attention.num_heads, 2, -1))[..., 1, :]
        for one in self.rows:
            means = gate_means(gate[None, one.start : one.stop])
            self.of[one.request_id].gate_sums[ordinal] += float(means.sum(dtype=torch.float64))
