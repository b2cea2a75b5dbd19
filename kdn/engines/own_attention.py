"""Passes of a model with attention of our own, while all other passes stay as they are.

Two of them go beyond what transformers offers: one looks at its weights (`ranking.py`), one has
queries at scattered positions (`recomputing.py`). A model is switched over for one pass. Meanwhile
others may let it read in other threads: they get what they would have got.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kdn.engines.grouped import grouped_attention
from kdn.engines.growing import GrowingLayer
from kdn.engines.latents import has_latents
from kdn.errors import UnsupportedError

NAME = "kdn_own"
"""What models are switched over to, and the number of what they are switched from."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Queries [key heads, group, tokens, channels], keys and values [key heads, tokens, channels] and
the scale of their products to outputs, shaped as the queries are."""

_own: ContextVar[Attention | None] = ContextVar("kdn_own_attention", default=None)
_before: list[str] = []
"""What models have been switched from."""
_switched = threading.RLock()
"""Held while a model is switched over: whoever comes second must not take the switched state for
the one to go back to."""


def check_attention(model: PreTrainedModel, past: Cache) -> None:
    """UnsupportedError if `own_attention` would not be all that the model's own does."""
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    for layer in past.layers:
        if type(layer) not in (DynamicLayer, GrowingLayer):
            raise UnsupportedError(
                f"{name}: layers that attend to a window cannot be looked into ({type(layer)})"
            )
    if has_latents(config):
        raise UnsupportedError(f"{name}: latent attention (MLA) cannot be looked into")
    if not model._can_set_attn_implementation():
        raise UnsupportedError(f"{name}: its attention cannot be exchanged")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(f"{name}: attention with soft caps is not supported here")


@contextmanager
def own_attention(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """Within, in this thread, the model attends so in every layer. The batch is of one."""
    calls = 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return attention(*arguments)

    with _switched:
        before = model.config._attn_implementation
        model.set_attn_implementation(_name_instead_of(before))
        token = _own.set(counted)
        try:
            yield
        finally:
            _own.reset(token)
            model.set_attn_implementation(before)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if calls % layers or not calls:
        raise UnsupportedError(
            f"{model.config.model_type}: {calls} of {layers} layers attended as told"
        )


def no_mask(model: PreTrainedModel) -> torch.Tensor:
    """To pass as `attention_mask`: transformers takes four dimensions for a mask that is ready, and
    spends no time on one."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=model.device)


def _name_instead_of(before: str) -> str:
    """Of an implementation that, for passes in other threads, is the one before: masks, too."""
    if before in _before:
        return f"{NAME}_{_before.index(before)}"
    name, usual = f"{NAME}_{len(_before)}", grouped_attention
    if before in ALL_ATTENTION_FUNCTIONS:
        usual = ALL_ATTENTION_FUNCTIONS[before]

    def attend(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        attention = _own.get()
        if attention is None:
            return usual(module, *arguments, **options)
        return _attend(attention, module, *arguments, **options)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    _before.append(before)
    return name


def _attend(
    attention: Attention,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it. There is no mask but `no_mask`."""
    for name in ("softcap", "position_bias", "s_aux", "sliding_window"):
        if options.get(name) is not None:
            raise UnsupportedError(f"{type(module).__name__}: attention with a {name}")
    _, heads, length, channels = query.shape
    grouped = query[0].reshape(key.shape[1], heads // key.shape[1], length, channels)
    scale = channels**-0.5 if scaling is None else scaling
    out = attention(grouped, key[0], value[0], scale).reshape(1, heads, length, -1)
    return out.transpose(1, 2).contiguous(), None
