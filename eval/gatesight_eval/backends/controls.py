"""The control that tells whether a task needs the KV cache at all."""

from gatesight_hf import GateSightCache


def empty_attention_cache(cache: GateSightCache) -> None:
    """Drop every KV entry of a compacted context; GDN states and the logical length stay."""
    for layer in cache.attention_layers:
        assert layer.kept_keys is not None and layer.kept_values is not None and layer.kept_positions is not None
        layer.evicted += layer.kept_length
        layer.kept_keys, layer.kept_values = layer.kept_keys[:, :, :0], layer.kept_values[:, :, :0]
        layer.kept_positions, layer.kept_valid = layer.kept_positions[:, :, :0], None
