"""What is checked when vLLM starts: a connector must say no by name, not serve wrong values."""

from __future__ import annotations

from typing import Any

import torch

from kdn.blend.pieces import check_joinable
from kdn.cache.spec import ModelSpec
from kdn.engines.vllm.layout import Layout, PagedCache, views
from kdn.engines.vllm.piece_ranges import MAX_SEPARATOR_TOKENS
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.weights import Weights, models_of
from kdn.errors import UnsupportedError
from kdn.places.places import is_folder

LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""That load the files which a model is named after."""
FP8 = ("fp8", "fp8_e4m3")
"""Kinds of KV cache of 8 bit that kdn knows, by vLLM's names: both are e4m3."""


def check_config(config: Any, settings: Settings) -> None:
    """UnsupportedError names the first setting of vLLM that kdn cannot serve."""
    parallel, cache = config.parallel_config, config.cache_config
    several = parallel.tensor_parallel_size > 1 or parallel.data_parallel_size > 1
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"a KV cache of {cache.cache_dtype}": str(cache.cache_dtype).startswith(
            ("fp8", "int", "nv")
        )
        and not is_fp8(config),
        "an fp8 cache whose scales are found while it runs (calculate_kv_scales)": is_fp8(config)
        and bool(getattr(cache, "calculate_kv_scales", False)),
        "a folder shared by several workers (use a node's URL)": several
        and any(map(is_folder, settings.session.where)),
        "LoRA for some modules only (target_modules)": bool(
            getattr(getattr(config, "lora_config", None), "target_modules", None)
        ),
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UnsupportedError(f"kdn does not support {what}")


def check_joins(settings: Settings, spec: ModelSpec, *, is_beside_others: bool = False) -> None:
    """That pieces of this model can be joined, if they are to be. Another connector may have asked
    for a request's hashes before kdn gives its blocks others: it would keep joined values under the
    names of exact ones."""
    if settings.blend == "off":
        return
    if is_beside_others:
        raise UnsupportedError(
            f'blend: expected "off" beside other connectors (MultiConnector), found '
            f"{settings.blend!r}: they could hand joined blocks to requests without a join"
        )
    check_joinable(spec)


def separator_of(config: Any, settings: Settings) -> tuple[int, ...]:
    """The tokens that end a piece, also where the operator gave them as a text."""
    given = settings.separator
    if not isinstance(given, str):
        return given
    from transformers import AutoTokenizer

    model = config.model_config
    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, revision=getattr(model, "tokenizer_revision", None), local_files_only=True
    )
    tokens = tuple(tokenizer.encode(given, add_special_tokens=False))
    if not 1 <= len(tokens) <= MAX_SEPARATOR_TOKENS:
        raise UnsupportedError(
            f"separator: expected a text of 1 to {MAX_SEPARATOR_TOKENS} tokens, found {len(tokens)}"
        )
    return tokens


def check_weights(config: Any) -> None:
    """Chunks are named by the checkpoint's files: the model must be what these say."""
    model = config.model_config
    load_format = _word(config.load_config.load_format)
    if load_format == "dummy":
        raise UnsupportedError("kdn does not support random weights (--load-format dummy)")
    if load_format not in LOAD_FORMATS:
        raise UnsupportedError(
            f"kdn does not support --load-format {load_format}: the weights may be others than "
            f"those of the checkpoint's safetensors files. It knows {', '.join(LOAD_FORMATS)}"
        )
    if getattr(model, "hf_config_path", None):
        raise UnsupportedError("kdn does not support a configuration from elsewhere")
    if (config_format := _word(getattr(model, "config_format", "auto"))) not in ("auto", "hf"):
        raise UnsupportedError(f"kdn does not support --config-format {config_format}")
    is_stored_so = getattr(model.hf_config, "quantization_config", None) is not None
    if model.quantization is not None and not is_stored_so:
        raise UnsupportedError(
            f"kdn does not support weights that vLLM quantises itself ({model.quantization}): they "
            "would share chunks with the model as it is stored. Use a quantised checkpoint"
        )


def _word(value: Any) -> str:
    """vLLM has some settings as enumerations, depending on its version."""
    return str(getattr(value, "value", value))


def is_fp8(config: Any) -> bool:
    """Whether vLLM's KV cache is of 8 bit. What is computed on top of it has other values than on
    top of one of 16 bit."""
    return str(config.cache_config.cache_dtype) in FP8


def holds_bytes(kv_cache_config: Any) -> bool:
    """Whether vLLM made a cache of 8 bit. Of some checkpoints that shows only when the model is
    built, and with several ranks only the workers' settings say so; this comes from them."""
    return any(
        getattr(one.kv_cache_spec.dtype, "itemsize", 2) == 1
        for one in kv_cache_config.kv_cache_groups
    )


def cache_dtype(config: Any) -> torch.dtype:
    """The dtype of the values in vLLM's KV cache; of one of 8 bit, that of the model."""
    told = str(config.cache_config.cache_dtype)
    is_models = told == "auto" or is_fp8(config)
    found = config.model_config.dtype if is_models else getattr(torch, told, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"kdn does not support a KV cache of {told}")
    return found


def device_of(config: Any) -> torch.device:
    """Where vLLM's KV cache lies."""
    kind = str(getattr(config.device_config, "device_type", "cpu"))
    return torch.device("cuda" if kind == "cuda" else "cpu")


def check_blocks(kv_cache_config: Any) -> None:
    """All layers must keep all tokens, in the same blocks."""
    groups = [_kinds(one.kv_cache_spec) for one in kv_cache_config.kv_cache_groups]
    if groups != [{"FullAttentionSpec"}]:
        named = [sorted(kinds) for kinds in groups]
        raise UnsupportedError(
            f"kdn supports models whose layers all keep all tokens; vLLM manages {named}. "
            "Where some layers do, --disable-hybrid-kv-cache-manager helps"
        )


def _kinds(spec: Any) -> set[str]:
    """Layers of one group may differ in size, as a draft model's do from the model's."""
    inner = getattr(spec, "kv_cache_specs", None)
    return {type(one).__name__ for one in (inner.values() if inner else [spec])}


def live_weights(layers: list[torch.nn.Module]) -> Weights:
    """Those of the model that these layers are a part of; they must be within sight, as it would
    not be noticed otherwise if they were replaced."""
    try:
        weights = Weights(models_of(layers))
    except RuntimeError as error:
        raise UnsupportedError(f"kdn cannot read the weights that vLLM has: {error}") from error
    if weights.num_sampled == 0:
        raise UnsupportedError("kdn cannot find the weights that vLLM computes with")
    return weights


def check_cpu_layout(config: Any, heads: int, head_dim: int, paged: PagedCache) -> None:
    """Let vLLM's own kernel store known values: they must be where kdn would look for them.

    The arrangement depends on the instructions that a machine has, and its shape does not tell.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens = paged.kernel_tokens
    isa = _get_attn_isa(paged.dtype, paged.block_tokens, head_dim, config.cache_config.cache_dtype)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, tokens, heads, head_dim, generator=generator).to(paged.dtype)
    layer = torch.zeros(2, heads, tokens, 2 * head_dim, dtype=paged.dtype)
    halves = layer.view(2, heads, 2 * tokens, head_dim).chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)
    found = [view[1] for view in views(layer, Layout.CPU)]
    if not (torch.equal(found[0], keys) and torch.equal(found[1], values)):
        raise UnsupportedError(
            f"vLLM's CPU kernels for {isa} and {paged.dtype} keep keys and values in an order that "
            "kdn does not know: use --dtype float32"
        )
