"""`gatesight inspect MODEL`: what a context takes in a cache, by formula from a model's configuration alone.

No weights are loaded: the model is built on the device `meta` only to count its parameters. Every formula is that of a
tensor that the cache really holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatesight_kernels.checks import check_whole_number

from ..compaction.budget import allocate, check_kept_fraction
from ..files.hub import open_source
from ..files.tensor_files import JSON_LIMIT, parse_json
from ..models.hybrid import HybridSpec
from ..models.loading import REFERENCE, load_config, model_dtype
from ..reference import ESTIMATOR_PATH
from ..scoring.estimator import EstimatorConfig
from ..scoring.mlp import CONFIG_NAME
from ..training.plan import INT64, Layout, estimator_sizes, estimator_words, layout_of, text_model_without_storage

#: Tokens of the contexts that are shown unless others are asked for, with the longest that the model is made for.
CONTEXTS = (4096, 32768, 131072)
KEPT_FRACTION = 0.1
INT32 = 4
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: What an estimator's configuration has and a model's does not.
OF_AN_ESTIMATOR = "gdn_windows"


def names_a_model(source: str, revision: str | None = None) -> tuple[bool, str | None]:
    """Whether a name that may be an estimator's or a model's is a model's; and the commit that was looked at.

    Args:
        source: `reference`, a folder, a Hub id, or a file that holds a model's configuration.
        revision: Branch, tag or commit of a repo.

    Raises:
        OSError, ValueError: See `files.hub.open_source`; there is no `config.json`, or it is too large.
    """
    if source == REFERENCE or Path(source).expanduser().is_file():
        if revision is not None:
            raise ValueError(f"--revision {revision} is for Hub repos; {source!r} is on this machine.")
        return True, None
    files = open_source(source, revision=revision)
    text = files.get(CONFIG_NAME, JSON_LIMIT).read_bytes()
    try:
        data = parse_json(text)
    except ValueError:
        return False, files.commit  # which of its lines is wrong, the reader of estimators says
    return isinstance(data, dict) and "model_type" in data and OF_AN_ESTIMATOR not in data, files.commit


@dataclass(frozen=True)
class CacheSizes:
    """Bytes that the parts of a `GateSightCache` have, in the model's dtype where nothing else is said.

    Attributes:
        spec: Layout of the model.
        layout: Its sizes.
        config: Configuration of the text model.
        rows: Of the batch, all of the same length.
    """

    spec: HybridSpec
    layout: Layout
    config: Any
    rows: int = 1

    def kv(self, entries: int) -> int:
        """`entries` per KV head, of all attention layers together."""
        layout = self.layout
        return self.rows * entries * layout.key_value_heads * layout.entry_channels * layout.value_bytes

    def full_kv(self, context: int) -> int:
        """All entries: what a `DynamicCache` holds of the attention layers too."""
        return self.rows * context * self.layout.cache_bytes_per_token

    def kept(self, context: int, kept_fraction: float) -> dict[str, Any]:
        """What stays after compaction, nothing protected, and layers sharing the budget equally.

        How it is shared changes the index of sparse attention by a block at most for each layer, and nothing else but
        with `allocation="global"`.
        """
        layers = self.layout.attention_layers
        counts = allocate(kept_fraction, context, layers, allocation="flat")
        # A layer that keeps everything has the same slots for all rows and heads, held once.
        slots = sum(n if n == context else self.rows * self.layout.key_value_heads * n for n in counts)
        return {
            "kept_fraction": kept_fraction,
            "kv_bytes": self.kv(sum(counts)),
            "index_bytes": sum(self._compacted_index(n) for n in counts),
            "position_bytes": slots * INT32,
        }

    def signals(self, context: int) -> int:
        """Write gate, log-decay and write magnitude of all GDN layers, until compaction."""
        return self.rows * context * self.layout.signal_bytes_per_token

    @property
    def recurrent(self) -> int:
        """Recurrent states of all GDN layers, float32."""
        return self.rows * self.layout.state_bytes

    @property
    def convolution(self) -> int:
        """Convolution states of all GDN layers: the last inputs of queries, keys and values."""
        spec, config = self.spec, self.config
        channels = 2 * spec.num_key_heads * spec.key_head_dim + spec.num_value_heads * spec.value_head_dim
        numbers = len(spec.gdn_layers) * channels * config.linear_conv_kernel_dim * self.layout.value_bytes
        return self.rows * (numbers + self._embedding_states())

    def _embedding_states(self) -> int:
        """Of per-layer embeddings, which look back at some inputs of a convolution and ids, of one row."""
        config, layers = self.config, len(getattr(self.config, "ple_layer_ids", None) or ())
        if not layers:
            return 0
        inputs = config.hc_count * config.hidden_size * (config.ple_conv_kernel_size - 1) * config.ngram_size
        return layers * (inputs * self.layout.value_bytes + (config.ngram_size - 1) * INT64)

    @property
    def windows(self) -> int:
        """Entries of all sliding windows, from the end of the context on."""
        if not self.spec.sliding_layers:
            return 0
        per_layer = 2 * self.layout.key_value_heads * self.layout.head_dim * self.layout.value_bytes
        return self.rows * len(self.spec.sliding_layers) * (self.spec.sliding_window or 0) * per_layer

    # -- sparse attention ----------------------------------------------------------------------------------------------

    @property
    def _rotary_channels(self) -> int:
        """Of the angles that an index needs."""
        return int(self.spec.head_dim * self.config.rope_parameters.get("partial_rotary_factor", 1.0))

    def index(self, context: int) -> int:
        """Index keys of all tokens, and their angles, cos and sin, which the layers share."""
        if not self.spec.indexed:
            return 0
        keys = self.layout.attention_layers * self.config.indexer_head_dim
        return self.rows * context * (keys + 2 * self._rotary_channels) * self.layout.value_bytes

    def _compacted_index(self, entries: int) -> int:
        """Of one layer: keys of full blocks, and keys and angles of the last tokens, which may begin one."""
        if not self.spec.indexed:
            return 0
        width, ratio = self.config.indexer_head_dim, self.config.indexer_compress_ratio
        numbers = entries // ratio * width + (ratio - 1) * (width + 2 * self._rotary_channels)
        return self.rows * numbers * self.layout.value_bytes

    def indexer_positions(self, context: int) -> int:
        """Positions of all tokens on three axes, int64, that an index asks for until compaction."""
        return 3 * self.rows * context * INT64 if self.spec.indexed else 0


def inspect_model(
    name: str,
    contexts: Sequence[int] = (),
    kept_fractions: Sequence[float] = (),
    dtype: str | None = None,
    rows: int = 1,
    revision: str | None = None,
) -> dict[str, Any]:
    """What contexts take in a cache, and what is known of an estimator for the model.

    Args:
        name: `reference` (bundled), a folder, a Hub id, or a file with the configuration.
        contexts: Tokens of each row. None given: `CONTEXTS` as far as the model is made for, and its longest.
        kept_fractions: Shares of the KV entries that stay, in (0, 1]. None given: 0.1.
        dtype: Of the model, such as `bfloat16`. None: the configuration's, or bfloat16.
        rows: Of the batch.
        revision: Of the repo on the Hub.

    Returns:
        A JSON object; all sizes are exact, in bytes.

    Raises:
        FileNotFoundError: No such folder.
        UnsupportedModelError: The model is no hybrid of a known family.
        ValueError: No such dtype, a size below 1, or a fraction outside (0, 1].
    """
    check_whole_number("rows", rows)
    for context in contexts:
        check_whole_number("context", context)
    fractions = [check_kept_fraction(fraction) for fraction in kept_fractions or (KEPT_FRACTION,)]
    config = load_config(name, revision)
    spec, text = HybridSpec.from_config(config), config.get_text_config(decoder=True)
    chosen = model_dtype(config, dtype)
    layout = layout_of(text_model_without_storage(config, chosen))
    sizes = CacheSizes(spec, layout, text, rows)
    longest = getattr(text, "max_position_embeddings", None)
    if not contexts:
        contexts = [n for n in CONTEXTS if longest is None or n < longest] + ([longest] if longest else [])
    states = {
        "gdn_bytes": sizes.recurrent + sizes.convolution,
        "recurrent_bytes": sizes.recurrent,
        "convolution_bytes": sizes.convolution,
        "sliding_window_bytes": sizes.windows,
    }
    return {
        "model": name,
        "model_type": spec.model_type,
        "fingerprint": spec.fingerprint,
        "dtype": str(chosen).removeprefix("torch."),
        "rows": rows,
        "longest_context": longest,
        "layers": {
            "attention": spec.num_attention_layers,
            "gdn": len(spec.gdn_layers),
            "sliding": len(spec.sliding_layers or ()),
        },
        "key_value_heads": spec.num_key_value_heads,
        "parameters": layout.parameters,
        "weights_bytes": layout.parameters * layout.value_bytes,
        "kv_bytes_per_token": sizes.full_kv(1),
        "signal_bytes_per_token": sizes.signals(1),
        **states,
        "contexts": [_of_context(sizes, context, fractions) for context in contexts],
        "child": {
            "gdn_bytes": states["gdn_bytes"],
            "sliding_window_bytes": sizes.windows,
            "kv_bytes_per_token": sizes.full_kv(1),
        },
        "estimator": _estimator(name, spec),
    }


def _of_context(sizes: CacheSizes, context: int, fractions: Sequence[float]) -> dict[str, Any]:
    full = {"kv_bytes": sizes.full_kv(context), "index_bytes": sizes.index(context)}
    full["position_bytes"] = sizes.indexer_positions(context)
    signals = sizes.signals(context)
    return {
        "context": context,
        **full,
        "signal_bytes": signals,
        "prefilled_bytes": sum(full.values()) + signals + sizes.recurrent + sizes.convolution + sizes.windows,
        "kept": [sizes.kept(context, fraction) for fraction in fractions],
    }


def _estimator(name: str, spec: HybridSpec) -> dict[str, Any]:
    config = EstimatorConfig.for_model(spec, name)
    known = str(ESTIMATOR_PATH) if name == REFERENCE else None
    command = f"gatesight train --model {name} --documents FOLDER --out ESTIMATOR"
    return {"known": known, "train": command, **estimator_sizes(config)}


# -- as text -----------------------------------------------------------------------------------------------------------


def readable(size: float) -> str:
    """A number of bytes in binary units, three digits or more: `12.8 MiB`."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {UNITS[unit]}"


def format_model(found: dict[str, Any]) -> str:
    """What `gatesight inspect MODEL` prints."""
    layers, rows = found["layers"], found["rows"]
    indexed = any(row["index_bytes"] for row in found["contexts"])
    counted = [f"{layers['attention']} attention of {found['key_value_heads']} KV heads", f"{layers['gdn']} GDN"]
    counted += [f"{layers['sliding']} with a sliding window"] if layers["sliding"] else []
    lines = [
        f"model            {found['model']} ({found['model_type']}, layout {found['fingerprint']})",
        f"weights          {found['parameters']:,} parameters of the text model in {found['dtype']}, "
        f"{readable(found['weights_bytes'])}",
        f"layers           {', '.join(counted)}",
        f"of one token     {readable(found['kv_bytes_per_token'])} of KV entries, "
        f"{readable(found['signal_bytes_per_token'])} of signals until compaction",
        f"GDN states       {readable(found['gdn_bytes'])} at any length, of it "
        f"{readable(found['convolution_bytes'])} of convolutions",
    ]
    if found["sliding_window_bytes"]:
        lines.append(f"windows          {readable(found['sliding_window_bytes'])} once they are full")
    lines += ["", *_table(found, indexed), ""]
    if rows > 1:
        lines.append(f"All of it for {rows} rows of that many tokens each.")
    for row in found["contexts"]:
        if found["longest_context"] and row["context"] > found["longest_context"]:
            lines.append(f"{row['context']:,} tokens are more than the {found['longest_context']:,} of the model.")
    child = found["child"]
    own = ["GDN states", *(["windows"] if layers["sliding"] else []), *(["index, as it grows"] if indexed else [])]
    lines.append(
        f"A fork for a question adds its own {' and '.join(own)}, and "
        f"{readable(child['kv_bytes_per_token'])} for each token that comes."
    )
    return "\n".join([*lines, "", *_advice(found["estimator"])])


def _table(found: dict[str, Any], indexed: bool) -> list[str]:
    fractions = [kept["kept_fraction"] for kept in found["contexts"][0]["kept"]]
    head = ["tokens", "full KV", *(f"kept {fraction:g}" for fraction in fractions)]
    head += ["full index", *(f"index {fraction:g}" for fraction in fractions)] if indexed else []
    cells = [[*head, "GDN states", "signals", "prefilled"]]
    for row in found["contexts"]:
        sizes = [row["kv_bytes"], *(kept["kv_bytes"] for kept in row["kept"])]
        sizes += [row["index_bytes"], *(kept["index_bytes"] for kept in row["kept"])] if indexed else []
        sizes += [found["gdn_bytes"], row["signal_bytes"], row["prefilled_bytes"]]
        cells.append([f"{row['context']:,}", *map(readable, sizes)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def _advice(estimator: dict[str, Any]) -> list[str]:
    words = f"{estimator_words(estimator)}, {estimator['parameters']:,} parameters"
    if estimator["known"] is not None:
        return [f"estimator        bundled with the library, and found by itself: {words}"]
    return [
        "No estimator for this model is known. Name yours where a command takes --estimator, or train one:",
        f"{words}.",
        f"    {estimator['train']}",
        "With --dry-run in place of --out that says what time, memory and disk it takes. Methods of",
        "gatesight_hf.methods, such as KeyDiff, need no training and take the same memory but for the signals.",
    ]
