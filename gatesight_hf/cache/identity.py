"""Which model, tokenizer and scorer something was made with: short texts that are equal for equal ones."""

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..checks import check_tokenizer
from ..errors import CacheStateError, SessionMismatchError
from ..models.hybrid import HybridSpec, find_modules

#: What else of a configuration tells what a model computes from its weights.
COMPUTED = (
    "rope_parameters", "rms_norm_eps", "hidden_act", "sliding_window", "num_experts_per_tok", "norm_topk_prob",
    "n_group", "topk_group", "routed_scaling_factor", "indexer_budget", "indexer_compress_ratio",
)  # fmt: skip
#: Tokenized to tell tokenizers of one vocabulary apart: case, numbers, spaces, accents, other scripts, special tokens.
SAMPLE = "The sky isn't BLUE:  1,234.5\n\tdef f(x): return x**2  # naïve Ångström 東京 тест 🙂 <|im_start|></s>"


def weights_digest(module: nn.Module) -> str:
    """A short digest of up to 128 values of every parameter: tells checkpoints of one layout apart.

    Any training changes nearly all values, so that a sample is enough, and takes a fraction of a second where reading
    all bytes of a 27B model takes a minute. Weights that were changed by hand in a few places may pass.
    """
    digest = hashlib.sha256()
    for name, parameter in _parameters(module):
        name = f"{name} {parameter.dtype} "
        values = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)]
        digest.update(name.encode() + values.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`named_parameters`, also of modules that accelerate has offloaded; those that are nowhere are left out."""
    seen = set()
    for prefix, part in module.named_modules():
        offloaded = getattr(getattr(part, "_hf_hook", None), "weights_map", None)
        for name, parameter in part.named_parameters(prefix, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if parameter.device.type != "meta":
                yield name, parameter
            elif offloaded is not None:
                yield name, offloaded[name.rpartition(".")[2]]


def model_identity(model: Any) -> dict[str, str]:
    """What must be equal of two models for one to go on from the other's cache.

    The decoder's weights, whatever wraps it; `weights` is a digest of a sample (`weights_digest`).

    Raises:
        UnsupportedModelError: The model is no hybrid of a known family.
    """
    spec, text = HybridSpec.of(model), model.config.get_text_config(decoder=True)
    decoder: Any = find_modules(model, spec).decoder
    of_text = {name: value for name in COMPUTED if (value := getattr(text, name, None)) is not None}
    return {
        "model_type": spec.model_type,
        "layout": spec.fingerprint,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "configuration": json.dumps(of_text, sort_keys=True, default=str),
        "weights": weights_digest(decoder),
    }


class _Known(NamedTuple):
    """The identity of a decoder's model, and which weights it was found for."""

    weights: tuple[tuple[int, int], ...]
    identity: dict[str, str]


_known: "weakref.WeakKeyDictionary[nn.Module, _Known]" = weakref.WeakKeyDictionary()


def _remembered_identity(model: Any, decoder: nn.Module) -> dict[str, str] | None:
    """`model_identity`, found once for as long as the weights are not replaced or written to.

    None for weights that are not in memory: a cache is made often, and reading them all would take long.
    """
    parameters = list(decoder.parameters())
    if any(p.is_meta for p in parameters):
        return None
    weights = tuple((id(p), 0 if p.is_inference() else p._version) for p in parameters)
    held = _known.get(decoder)
    if held is None or held.weights != weights:
        held = _known[decoder] = _Known(weights, model_identity(model))
    return held.identity


def tokenizer_identity(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary and of how it splits a sample."""
    check_tokenizer(tokenizer)
    content = [sorted(tokenizer.get_vocab().items()), tokenizer(SAMPLE).input_ids]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Identity:
    """What a cache belongs to.

    Attributes:
        model: See `model_identity`.
        tokenizer: See `tokenizer_identity`; None if there was none.
        scorer: A trained scorer's own `identity` (of its weights too), or the name of its class; None if there is none.
    """

    model: dict[str, str]
    tokenizer: str | None
    scorer: str | None

    @classmethod
    def of(cls, model: Any, tokenizer: Any, scorer: Any) -> "Identity":
        return cls(
            model=model_identity(model),
            tokenizer=None if tokenizer is None else tokenizer_identity(tokenizer),
            scorer=None if scorer is None else getattr(scorer, "identity", None) or type(scorer).__name__,
        )

    def difference(self, wanted: "Identity") -> tuple[str, str, str] | None:
        """What is not as `wanted`, if anything: its name, as it is, as it is wanted. What `wanted` lacks may be any."""
        for name, text in wanted.model.items():
            if self.model[name] != text:
                return f"model's {name}", self.model[name], text
        for name in ("tokenizer", "scorer"):
            own, text = getattr(self, name), getattr(wanted, name)
            if text is not None and own != text:
                return name, str(own), text
        return None


class ModelReference:
    """The one model object that a cache belongs to, held weakly, with any wrapper around its decoder.

    Copies of the cache belong to the same object. Pickles do not hold it, but remember which model it was.
    """

    def __init__(self, model: Any) -> None:
        decoder = find_modules(model, HybridSpec.of(model)).decoder
        self._model, self._decoder = weakref.ref(model), weakref.ref(decoder)
        self._identity = _remembered_identity(model, decoder)
        self._pickled = False

    def existing(self) -> Any:
        """The model.

        Raises:
            CacheStateError: It is gone, or the cache was pickled.
        """
        return self._existing(self._model)

    @property
    def decoder(self) -> nn.Module:
        """Of the model; errors as in `existing`."""
        return self._existing(self._decoder)

    def _existing(self, reference: Callable[[], Any]) -> Any:
        held = reference()
        if held is None:
            lost = "was pickled, which leaves its model out" if self._pickled else "has lost its model object"
            raise CacheStateError(f"This cache {lost}: call cache.tie(model) with the model that it was made for.")
        return held

    def check(self, decoder: nn.Module) -> None:
        """Raise an error unless `decoder` is the model's.

        Raises:
            CacheStateError: It is that of another model object, or see `decoder`.
        """
        if decoder is not self.decoder:
            raise CacheStateError(
                "This cache belongs to another model object: its entries and states are of no use to this one. Make a "
                "cache for this model; if it is the same model, loaded or copied again, call cache.tie(model) first."
            )

    def check_same(self, model: Any) -> None:
        """Raise an error unless another object is of the same model, as far as that is known.

        Raises:
            SessionMismatchError: Another layout, dtype or other weights.
        """
        own, known = self._model(), self._identity
        if known is None and own is not None:
            known = model_identity(own)
        for name, text in model_identity(model).items():
            if known is not None and known[name] != text:
                raise SessionMismatchError(f"The cache is of another model: its {name} is {known[name]}, not {text}.")

    def __deepcopy__(self, memo: Any) -> "ModelReference":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_identity": self._identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = self._decoder = lambda: None  # type: ignore[assignment]
        self._identity, self._pickled = state["_identity"], True
