"""What parents' prefills show of themselves in vLLM: GDN signals and mean output gates, chunk by chunk, row by row.

Compiled models call no Python but that of custom ops. So hooks of modules, which are traced with the model, hand what
they are given to an op of ours, and the op to the recorder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op

from gatesight_kernels import gate_means

from ..models.hybrid import HybridSpec

#: Lives as long as its op.
LIBRARY = torch.library.Library("gatesight", "FRAGMENT")


def observe(given: Tensor, seen: Tensor, layer_name: LayerNameType) -> None:
    """Show an observer of a layer what one of its projections gave.

    Args:
        given: `[tokens, channels]`.
        seen: Of one element, said to be changed: otherwise a compiler would leave the call out.
        layer_name: As in vLLM's own ops.
    """
    layer: Any = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.gatesight_observer(given)


def _observe_nothing(given: Tensor, seen: Tensor, layer_name: LayerNameType) -> None:
    return None


direct_register_custom_op("observe", observe, mutates_args=["seen"], fake_impl=_observe_nothing, target_lib=LIBRARY)


def _hand_on(layer_name: Any, module: Any, args: Any, output: Any) -> None:
    torch.ops.gatesight.observe(output[0], module.gatesight_seen, layer_name)


def _observed(projection: nn.Module, layer: Any, layer_name: str, observer: Callable[[Tensor], None]) -> None:
    """Have a projection of a layer observed."""
    layer.gatesight_observer = observer
    device = next(projection.parameters()).device
    projection.register_buffer("gatesight_seen", torch.zeros(1, device=device), persistent=False)
    projection.register_forward_hook(partial(_hand_on, _encode_layer_name(layer_name)))


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
        #: Of the step under way, by GDN ordinal: write gates and decays of each parent, `[n, 2, HV]`, and magnitudes of
        #: all tokens, `[n, HV]`, of decodes first and then of prefills. Compiled models need not give them in order.
        self._gates: dict[int, list[Tensor]] = {}
        self._magnitudes: dict[int, list[Tensor]] = {}

    def attach(self, model: nn.Module) -> None:
        """Put the hooks on, before anything is compiled.

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
            _observed(layer.in_proj_ba, layer, layer.prefix, partial(self._keep_gates, i, layer))
            # Called with the values after their convolution, also from within vLLM's op.
            layer.rearrange_mixed_qkv = partial(self._keep_magnitudes, i, layer.rearrange_mixed_qkv)
        for j, index in enumerate(self.spec.attention_layers):
            module = attention[index]
            _observed(module.qkv_proj, module.attn, module.attn.layer_name, partial(self._add_gates, j, module))

    def begin(self, parents: list[str], scheduled: dict[str, int]) -> None:
        """Called before each forward with the requests to record, and the tokens of all requests."""
        self._parents, self._scheduled, self._rows = parents, scheduled, None
        for request_id in parents:
            if request_id not in self.of:
                layers = self.spec.num_attention_layers
                self.of[request_id] = Recorded([[] for _ in self.spec.gdn_layers], [0.0] * layers)

    def end(self) -> None:
        """Called after each forward."""
        for gdn, gates in self._gates.items():
            magnitudes = torch.cat(self._magnitudes[gdn])
            for one, of_one in zip(self.rows, gates, strict=True):
                rows = magnitudes[one.start : one.stop]
                self.of[one.request_id].signals[gdn].append(torch.cat([of_one, rows.unsqueeze(1)], dim=1))
        self._gates, self._magnitudes = {}, {}
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

    # -- observers -----------------------------------------------------------------------------------------------------

    def _keep_gates(self, gdn: int, layer: Any, ba: Tensor) -> None:
        if not self.rows:
            return
        if layer.gqa_interleaved_layout:  # [b | a] of each key head
            heads = layer.num_k_heads // layer.tp_size
            b, a = (part.flatten(1) for part in ba.unflatten(-1, (heads, 2, -1)).unbind(-2))
        else:
            b, a = ba.chunk(2, dim=-1)
        own = layer.num_v_heads // layer.tp_size
        if b.shape[-1] > own:  # where workers share heads, quantised projections may be whole in each
            b, a = (part.narrow(-1, layer.tp_rank * own, own) for part in (b, a))
        self._gates[gdn] = []
        for one in self.rows:
            rows = slice(one.start, one.stop)
            decay = -layer.A_log.float().exp() * F.softplus(a[rows].float() + layer.dt_bias.float())
            self._gates[gdn].append(torch.stack([b[rows].float().sigmoid(), decay], dim=1).to(ba.dtype))

    def _keep_magnitudes(self, gdn: int, plain: Any, mixed_qkv: Tensor) -> Any:
        query, key, value = plain(mixed_qkv)
        if self.rows and value is not None:
            self._magnitudes.setdefault(gdn, []).append(value[0].float().norm(dim=-1).to(value.dtype))
        return query, key, value

    def _add_gates(self, ordinal: int, attention: Any, qkv: Tensor) -> None:
        if not self.rows or not attention.attn_output_gate:
            return
        size = 2 * attention.num_heads * attention.head_dim
        gate = qkv[:, :size].unflatten(-1, (attention.num_heads, 2, -1))[..., 1, :]
        for one in self.rows:
            means = gate_means(gate[None, one.start : one.stop])
            self.of[one.request_id].gate_sums[ordinal] += float(means.sum(dtype=torch.float64))
