"""vLLM's paged cache with layers of different lengths: cache specs, block accounting, attention metadata.

Each attention layer is a KV-cache group of its own, so that it has its own block table and frees its own blocks. A
child's positions stay logical; blocks, slots and lengths of its rows are physical: less by what its layer evicted.

A block's hash says which tokens it holds, and of blocks that were compacted, or that children fill in physical order,
it would not be true. So requests of sessions have no hashes (`without_hashes`): they find no block and leave none to be
found, while ordinary requests share theirs as ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadata, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def without_hashes(request: "Request") -> None:
    """Make a request as one is without prefix caching: no block is found for it, or afterwards by others."""
    request.block_hashes, request._block_hasher = [], None


def blocks_to_run(manager: "KVCacheManager", request: "Request", inherited: int = 0) -> int:
    """Blocks that must be free so that a waiting request may run, as vLLM counts them; at least as many as that.

    More than there are, where blocks that it would find are being filled in this very step.

    Args:
        inherited: Tokens that a child does not run; its managers know what it inherits.
    """
    coordinator, tokens = manager.coordinator, request.num_tokens
    managers = coordinator.single_type_managers
    most = sum(cdiv(tokens, one.block_size) for one in managers)
    if not inherited and most <= manager.block_pool.get_num_free_blocks():
        return most  # nothing need be looked up
    found: tuple[list[KVCacheBlock], ...] = tuple([] for _ in managers)
    cached = 0
    if manager.prefix_cache_lookup_enabled(request):
        found, cached, _ = coordinator.find_longest_cache_hit(request.block_hashes, tokens - 1)
    computed = cached + inherited
    needed: int = coordinator.get_num_blocks_to_allocate(
        request.request_id, tokens, found, 0, computed, cached, tokens, apply_admission_cap=True
    )
    return needed


@dataclass(frozen=True, kw_only=True)
class GateSightAttentionSpec(FullAttentionSpec):
    """Full attention in a group of its own.

    Attributes:
        layer_name: Of the only layer of the group.
    """

    layer_name: str = ""

    @classmethod
    def of(cls, spec: FullAttentionSpec, layer_name: str) -> "GateSightAttentionSpec":
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec)}, layer_name=layer_name)

    @classmethod
    def merge(cls, specs: list[KVCacheSpec]) -> KVCacheSpec:
        """Raises ValueError for two layers: vLLM then gives them groups of their own."""
        if len(set(specs)) != 1:
            raise ValueError("Attention layers of GateSight do not share block tables.")
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class GateSightStateSpec(MambaSpec):
    """States of GDN layers, in groups as vLLM makes them."""

    @classmethod
    def of(cls, spec: MambaSpec) -> "GateSightStateSpec":
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec)})


@dataclass(frozen=True)
class Inherited:
    """What a child has of its parent in one group of layers.

    Attributes:
        blocks: Of the parent, in order; the last one is copied if it is not full. Of GDN layers the one with the state.
        kept: Entries per KV head; of GDN layers the tokens that the state has seen.
        evicted: Entries per KV head that are gone: logical less physical length.
    """

    blocks: Sequence[KVCacheBlock]
    kept: int
    evicted: int = 0


class _Inheriting:
    """What managers of both kinds do for sessions; of request ids, what children inherit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inherited: dict[str, Inherited] = {}
        #: Source and target block of each block that was copied since `take_copies`.
        self._copies: list[tuple[int, int]] = []

    def inherit(self, request_id: str, inherited: Inherited) -> None:
        """Say, before its blocks are allocated, that a request is a child."""
        self._inherited[request_id] = inherited

    def disinherit(self, request_id: str) -> None:
        """Say, before its blocks are allocated, that a request is no child after all."""
        self._inherited.pop(request_id, None)

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def cache_blocks(self, request: "Request", *args: Any, **kwargs: Any) -> None:
        if request.block_hashes:
            super().cache_blocks(request, *args, **kwargs)  # type: ignore[misc]


class GateSightAttentionManager(_Inheriting, FullAttentionManager):
    """Block accounting in physical tokens for children, in vLLM's own way for everything else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stale: list[int] = []

    def take_stale(self) -> list[int]:
        """First blocks of children that ended or were preempted since the last call, where they were their own."""
        stale, self._stale = self._stale, []
        return stale

    def _physical(self, request_id: str, tokens: int) -> int:
        return max(0, tokens - self._inherited[request_id].evicted)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        inherited = self._inherited.get(request_id)
        if inherited is None:
            return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        held = len(self.req_to_blocks.get(request_id, ())) or inherited.kept // self.block_size
        return max(0, cdiv(self._physical(request_id, num_tokens), self.block_size) - held)

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        inherited = self._inherited.get(request_id)
        if inherited is None:
            super().allocate_external_computed_blocks(request_id, *args, **kwargs)
            return
        full = inherited.kept // self.block_size
        shared = list(inherited.blocks[:full])
        self.block_pool.touch(shared)
        self.req_to_blocks[request_id].extend(shared)
        if full < len(inherited.blocks):
            own = self.block_pool.get_new_blocks(1)[0]
            self.req_to_blocks[request_id].append(own)
            self._copies.append((inherited.blocks[full].block_id, own.block_id))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        if request_id in self._inherited:
            num_tokens = self._physical(request_id, num_tokens)
            num_tokens_main_model = self._physical(request_id, num_tokens_main_model)
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        inherited = self._inherited.pop(request_id, None)
        blocks = super().pop_blocks_for_free(request_id)
        if inherited is not None and inherited.kept < self.block_size and blocks:
            self._stale.append(blocks[0].block_id)
        return blocks


class GateSightStateManager(_Inheriting, MambaManager):
    """Children begin with a state of their parent; everything else is accounted for in vLLM's own way.

    A block is for the state at its last token. Without prefix caching there is one block for all tokens.
    """

    def state_at(self, tokens: int) -> int:
        """Where in a request's blocks the state after so many tokens is, while no later one has overwritten it."""
        return int((tokens - 1) // self.block_size)

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        inherited = self._inherited.get(request_id)
        if inherited is not None and inherited.kept % self.block_size == 0:
            # The child's first step has a block of its own, to which the runner brings this state.
            self.block_pool.touch(inherited.blocks)
            self.req_to_blocks[request_id].extend(inherited.blocks)
            return
        super().allocate_external_computed_blocks(request_id, *args, **kwargs)
        if inherited is not None:
            (state,), own = inherited.blocks, self.req_to_blocks[request_id][-1]
            self._copies.append((state.block_id, own.block_id))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._inherited.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks


class GateSightMetadataBuilder(CPUAttentionMetadataBuilder):
    """Attention metadata in which rows of children have physical lengths and slots."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        evicted = self._evicted(common)
        if evicted is not None:
            rows = common.num_reqs
            starts = common.query_start_loc[: rows + 1].long()
            row = torch.repeat_interleave(torch.arange(rows), starts.diff())
            position = common.positions[: len(row)].long() - evicted[row]
            block = common.block_table_tensor[row, position // self.block_size].long()
            # In place: the forward reads slots of a layer, which are those of its group, from this storage.
            common.slot_mapping[: len(row)] = block * self.block_size + position % self.block_size
            lengths = common.seq_lens[:rows] - evicted
            common = replace(common, seq_lens=lengths.to(common.seq_lens.dtype), max_seq_len=int(lengths.max()))
        return super().build(common_prefix_len, common, fast_build)

    def _evicted(self, common: CommonAttentionMetadata) -> Tensor | None:
        """Evicted entries of each row, `[rows]`, int64; None if there are none."""
        name = getattr(self.kv_cache_spec, "layer_name", None)
        table = getattr(get_kv_transfer_group(), "evicted", {}).get(name) if has_kv_transfer_group() else None
        if table is None or not common.num_reqs:
            return None
        found: Tensor = table[common.block_table_tensor[: common.num_reqs, 0].long()]
        return found if bool(found.any()) else None


class GateSightBackend(CPUAttentionBackend):
    """vLLM's attention on CPUs with physical lengths."""

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return GateSightMetadataBuilder


def register_paged() -> None:
    """Register specs, managers and backend; engines without GateSight layers see no difference."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{GateSightBackend.__name__}")
    # The registry fills itself only while it is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        GateSightAttentionSpec, GateSightAttentionManager, uniform_type_base_spec=GateSightAttentionSpec
    )
    KVCacheSpecRegistry.register(GateSightStateSpec, GateSightStateManager, uniform_type_base_spec=MambaSpec)
