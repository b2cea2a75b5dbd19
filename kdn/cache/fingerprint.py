"""Who a model is, in 16 bytes: equal in every process, engine and dtype it is loaded in.

Two caches may share a key only if the same weights made them, under the same settings. Every
element of every weight counts: a few trained embeddings or one merged adapter make another model.
So does every setting, but for those that cannot change keys and values (IGNORED_SETTINGS).

Elements are rounded to bfloat16 first, so that a bfloat16 checkpoint has one fingerprint whether an
engine holds it as float32, bfloat16 or float16. (A float32 checkpoint loaded as float16 is a
different model: its weights were rounded differently.) Quantised weights count bit by bit.

Only names, shapes and elements are needed: checkpoint files serve as well as a loaded model.

One thread rounds, piece by piece, while others hash with BLAKE2b: nobody can make two models for
one fingerprint. The 135 million weights of SmolLM2 take 0.4 s on two cores. By that measure a
bfloat16 checkpoint of 8 billion weights takes 25 s there and about 6 s on eight cores, if its files
are read as fast; `kdn.engines.remembered` keeps what was found. Memory: at most 100 MB beside the
weights.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b

import torch

from kdn.cache.spec import FINGERPRINT_BYTES
from kdn.errors import MismatchError, UnsupportedError

VERSION = 2
"""Of all that follows: every fingerprint changes with it."""
PIECE_ELEMENTS = 1 << 20
MAX_THREADS = 8

# float16 holds any bfloat16 exactly down to 2**-17; what is not larger than this counts as zero.
_TINY = 2.0**-16

# What changes no keys or values, or only through the weights' names and shapes. `top_k` and
# `temperature` are not among the settings of generation here: routers and attention may have their
# own. (For `pad_token_id` see `kdn.engines.transformers.settings_of`.)
IGNORED_SETTINGS = frozenset(
    (
        # names, places and versions
        "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures",
        "auto_map", "tokenizer_class", "torchscript", "unsloth_version", "transformers.js_config",
        # how the model is held and run
        "dtype", "torch_dtype", "tie_word_embeddings", "_attn_implementation", "use_cache",
        "gradient_checkpointing", "chunk_size_feed_forward",
        # what it returns
        "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id",
        "problem_type", "finetuning_task", "task_specific_params",
        # training
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout",
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "output_router_logits", "router_aux_loss_coef",
        # generation
        "bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens",
        "begin_suppress_tokens", "max_length", "min_length", "max_new_tokens", "do_sample",
        "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences", "top_p",
        "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "remove_invalid_values",
        "exponential_decay_length_penalty", "output_scores", "return_dict_in_generate",
    )
)  # fmt: skip


def fingerprint(
    settings: Mapping[str, object], weights: Iterable[tuple[str, torch.Tensor]]
) -> bytes:
    """Digest of the model's settings and of every named weight.

    The order of either does not matter; tied weights are to be named once. A setting of None
    counts: leave out what is not set.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=b"kdn-model")
    _update(digest, VERSION.to_bytes(4, "little"))
    _update(digest, canonical_settings(settings))
    entries = _digests(weights)
    for name in sorted(entries):
        _update(digest, name.encode())
        _update(digest, entries[name])
    return digest.digest()


def canonical_settings(settings: Mapping[str, object]) -> bytes:
    """The settings that count, equal for all their spellings."""
    counted = {k: v for k, v in settings.items() if k not in IGNORED_SETTINGS}
    canonical = {name: _canonical(value) for name, value in counted.items()}
    return json.dumps(canonical, sort_keys=True).encode()


def _canonical(value: object) -> object:
    """Numbers as floats (10000 is 10000.0), sequences as lists, unset settings left out."""
    if isinstance(value, Mapping):
        return {
            str(name): _canonical(part)
            for name, part in value.items()
            if part is not None and name not in IGNORED_SETTINGS
        }
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return float(value)
    return str(value)


def _update(digest: blake2b, part: bytes) -> None:
    """Length first: no two lists of parts read alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """Shape and digests of all pieces, for each weight. No more pieces are in memory than the
    threads need to stay busy."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    entries: dict[str, list[Future[bytes]]] = {}
    shapes: dict[str, bytes] = {}
    hashing: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name, tensor in weights:
            if name in entries:
                raise MismatchError(f"weight {name!r} is named twice")
            shapes[name], entries[name] = _shape(name, tensor), []
            for piece in _pieces(tensor.detach()):
                entries[name].append(pool.submit(_digest, piece))
                hashing.append(entries[name][-1])
                if len(hashing) > 2 * threads:
                    hashing.popleft().result()
        return {name: shapes[name] + b"".join(f.result() for f in entries[name]) for name in shapes}


def _digest(piece: torch.Tensor) -> bytes:
    return blake2b(piece.numpy().data, digest_size=32, person=b"kdn-weight").digest()


def _shape(name: str, tensor: torch.Tensor) -> bytes:
    """And what the elements are, where they are not compared as numbers."""
    if tensor.is_meta:
        raise UnsupportedError(f"weight {name!r} is not in memory: load the model without offload")
    kind = "float" if _is_float(tensor) else str(tensor.dtype)
    return f"{kind} {list(tensor.shape)} ".encode()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its elements in order, as bytes to be hashed, in memory of the CPU."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), PIECE_ELEMENTS):
        piece = flat[start : start + PIECE_ELEMENTS]
        if _is_float(tensor):
            # Rounded first: what is rounded up to more than _TINY is not zero in any dtype.
            piece = torch.nn.functional.hardshrink(piece.bfloat16(), _TINY)
        yield piece.cpu().view(torch.uint8)


def _is_float(tensor: torch.Tensor) -> bool:
    """Whether an engine may hold it in another dtype than the checkpoint does."""
    return tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
