"""Which of vLLM's attention layers are the model's own, and what their caches of 8 bit hold.

With speculative decoding, a draft model has layers and caches beside those of the model that
answers. They are of no interest: drafts are checked, never answered with. vLLM tells them apart by
names alone. A separate draft model has a prefix of its own (`draft_model.model.layers.0...`); EAGLE
and MTP count on where the model ends (`model.layers.32...` after 32 layers), some under a prefix of
their own (`mtp.layers.32...`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from kdn.engines.vllm.layout import Scales
from kdn.errors import UnsupportedError

_LAYER = re.compile(r"^(?P<prefix>(?:.*?\.)?)layers\.(?P<number>\d+)\.")
_DRAFTS = ("draft_model.", "mtp.")


def layers_in_order(names: Iterable[str], num_layers: int, *, has_drafts: bool) -> list[str]:
    """The names of the model's layers, from the first to the last."""
    families: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for name in names:
        found = _LAYER.match(name)
        if found is None:
            raise UnsupportedError(f"kdn does not know vLLM's cache {name!r}")
        prefix, number = found["prefix"], int(found["number"])
        if has_drafts and (number >= num_layers or prefix.startswith(_DRAFTS)):
            continue
        if number in families[prefix]:
            raise UnsupportedError(f"kdn does not know vLLM's cache {name!r} beside another")
        families[prefix][number] = name
    if len(families) != 1:
        raise UnsupportedError(f"kdn expects the layers of one model, found {sorted(families)}")
    [family] = families.values()
    if sorted(family) != list(range(num_layers)):
        raise UnsupportedError(
            f"kdn expects all {num_layers} layers in one worker, found {sorted(family)}"
        )
    return [family[number] for number in range(num_layers)]


def scales_of(layers: Sequence[Any]) -> Scales:
    """Of attention layers whose caches are fp8: one scale for a layer's keys, one for its
    values."""
    for layer in layers:
        if any(getattr(layer, name).numel() != 1 for name in ("_k_scale", "_v_scale")):
            raise UnsupportedError("kdn does not support fp8 caches with a scale for each head")
    return Scales(
        tuple(float(layer._k_scale_float) for layer in layers),
        tuple(float(layer._v_scale_float) for layer in layers),
    )
