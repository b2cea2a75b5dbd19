"""Who a model is, in 16 bytes: equal in every process, engine and dtype it is loaded in.

Two caches may share a key only if the same weights made them, so a name or a configuration is not
enough: a merged fine-tune keeps both. Hashing all weights would take minutes; a few elements of
every tensor tell any two trainings apart. They are rounded to bfloat16, so that a bfloat16
checkpoint has one fingerprint whether an engine holds it as float32, bfloat16 or float16. (A
float32 checkpoint loaded as float16 is a different model: its weights were rounded differently.)

Only names, shapes and elements are needed: checkpoint files serve as well as a loaded model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b

import torch

from kdn.cache.spec import FINGERPRINT_BYTES
from kdn.errors import MismatchError, UnsupportedError

SAMPLES_PER_WEIGHT = 16

# float16 holds any bfloat16 exactly down to 2**-17; what is smaller counts as zero.
_SMALLEST = 2.0**-16

# The settings that change keys and values although no weight does. Fields a model lacks, or leaves
# unset, do not count; neither do sizes, which the weights' shapes tell. `windows` is the attention
# window of each layer (None: all tokens): engines spell it in too many ways to compare.
CONFIG_FIELDS = (
    "model_type",
    "attention_multiplier",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "no_rope_layers",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_key_value_heads",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rms_norm_eps",
    "rope_parameters",
    "windows",
)


def fingerprint(config: Mapping[str, object], weights: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Digest of the CONFIG_FIELDS present in `config` and of samples of every named weight.

    The order of `weights` does not matter; tied weights are to be named once.
    """
    entries: dict[str, bytes] = {}
    for name, tensor in weights:
        if name in entries:
            raise MismatchError(f"weight {name!r} is named twice")
        entries[name] = _sampled(name, tensor)
    fields = {name: config[name] for name in CONFIG_FIELDS if config.get(name) is not None}
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=b"kdn-model")
    _update(digest, json.dumps(_canonical(fields), sort_keys=True).encode())
    for name in sorted(entries):
        _update(digest, name.encode())
        _update(digest, entries[name])
    return digest.digest()


def _update(digest: blake2b, part: bytes) -> None:
    """Length first: no two lists of parts read alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _sampled(name: str, tensor: torch.Tensor) -> bytes:
    """Shape, then evenly strided elements from the first to the last, as bfloat16."""
    if tensor.is_meta:
        raise UnsupportedError(f"weight {name!r} is not in memory: load the model without offload")
    shape = b"".join(size.to_bytes(8, "little") for size in tensor.shape)
    count = tensor.numel()
    if count == 0:
        return shape
    steps = range(SAMPLES_PER_WEIGHT)
    flat = torch.tensor([i * (count - 1) // (SAMPLES_PER_WEIGHT - 1) for i in steps])
    index = tuple(axis.to(tensor.device) for axis in torch.unravel_index(flat, tensor.shape))
    sample = (tensor.detach()[index] if tensor.ndim else tensor.detach()).cpu().float()
    sample = torch.where(sample.abs() < _SMALLEST, 0.0, sample).bfloat16()
    return shape + sample.view(torch.int16).numpy().astype("<i2").tobytes()


def _canonical(value: object) -> object:
    """Numbers as floats (10000 is 10000.0), sequences as lists, unset settings left out."""
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return float(value)
    return str(value)
