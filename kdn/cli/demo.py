"""`kdn demo`: a real model reads a document, and its cache goes through the codec and back.

Every level is decoded from real bytes and held against the exact cache on the model itself: by what
follows the document, and by passages of it that the model can repeat only if it still knows them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kdn.cache.keys import TAIL_MULTIPLE, Chunk, Namespace, TokenIds, cut
from kdn.cache.tensors import KVCache
from kdn.calibrate.corpus import Text, default_texts, load_text
from kdn.codec.base import Codec
from kdn.codec.format import Bitstream
from kdn.engines.models import load_model
from kdn.engines.quality import Quality, QualityProbe
from kdn.engines.transformers import spec_of
from kdn.errors import MismatchError

CONTINUATION_TOKENS = 128
FP16_BYTES = 2


@dataclass(frozen=True)
class Row:
    """What the first `levels` levels of a context cost, and what they are worth."""

    levels: int
    size_bytes: int
    decode_s: float
    quality: Quality


def run(model_name: str, text_path: Path | None, context: int) -> None:
    """Load, prefill, encode, decode, compare, print."""
    from kdn.codec import open_codec

    console = Console()
    text = load_text(text_path) if text_path else default_texts()[0]
    with console.status(f"Loading {model_name}"):
        model, tokenizer = load_model(model_name)
        codec = open_codec("klt", spec_of(model))
    tokens = _window(text, text.tokens(tokenizer), context)
    context = len(tokens) - CONTINUATION_TOKENS
    with console.status(f"The model reads {context} tokens of {text.name}"):
        probe = QualityProbe(model, tokens, context)
    chunks = cut(tokens[:context], Namespace(codec.spec.fingerprint, codec.profile_id))
    with console.status("Encoding"):
        _warm_up(codec, chunks[0], probe.cache)
        begin = time.perf_counter()
        streams = codec.encode_all(chunks, probe.cache)
        encode_s = time.perf_counter() - begin
    with console.status("Decoding and comparing"):
        rows = [
            compare(codec, chunks, streams, probe, levels)
            for levels in range(1, codec.num_levels + 1)
        ]
    console.print(_table(rows, probe, text.name))
    console.print(
        f"Reading took the model {probe.prefill_s:.2f} s, encoding all levels {encode_s:.2f} s. "
        "Each level is a prefix of the same bytes. KLD: how far the model's predictions of the "
        "following text move; recall: of passages from far back; speedup: against reading."
    )


def compare(
    codec: Codec,
    chunks: Sequence[Chunk],
    streams: Sequence[bytes],
    probe: QualityProbe,
    levels: int,
) -> Row:
    """Decode a context from the bytes of its first levels alone and measure it on the model."""
    exact = probe.cache
    out = KVCache.empty(
        exact.num_layers,
        exact.num_tokens,
        exact.num_kv_heads,
        exact.head_dim,
        dtype=exact.dtype,
        valid_from=exact.valid_from,
    )
    prefixes = [data[: Bitstream.parse(data).level_end(levels - 1)] for data in streams]
    begin = time.perf_counter()
    codec.decode_all([Bitstream.parse(data) for data in prefixes], chunks, out)
    decode_s = time.perf_counter() - begin
    return Row(levels, sum(map(len, prefixes)), decode_s, probe.measure(out))


def _window(text: Text, tokens: TokenIds, context: int) -> TokenIds:
    """The first tokens of the text: a context of whole chunks and tails, then its continuation."""
    context = min(context, len(tokens) - CONTINUATION_TOKENS) // TAIL_MULTIPLE * TAIL_MULTIPLE
    if context < 1:
        raise MismatchError(f"{text.name} has {len(tokens)} tokens, too few to read")
    return np.ascontiguousarray(tokens[: context + CONTINUATION_TOKENS])


def _warm_up(codec: Codec, chunk: Chunk, cache: KVCache) -> None:
    """Kernels are compiled on first use: that is not what is timed."""
    data = codec.encode(chunk, cache.slice(chunk.start, chunk.end))
    codec.decode(Bitstream.parse(data), chunk)


def _table(rows: Sequence[Row], probe: QualityProbe, text_name: str) -> Table:
    values = 2 * probe.cache.keys.numel()
    table = Table(title=f"The KV cache of {probe.context} tokens of {text_name}")
    for heading in ("levels", "MB", "bits", "ratio", "KLD", "recall"):
        table.add_column(heading, justify="right")
    for heading in ("top-1", "decode", "speedup"):
        table.add_column(heading, justify="right")
    table.add_row("fp16", f"{values * FP16_BYTES / 1e6:.2f}", "16.00", "1.0", "", "", "", "", "")
    for row in rows:
        table.add_row(
            str(row.levels),
            f"{row.size_bytes / 1e6:.2f}",
            f"{8 * row.size_bytes / values:.2f}",
            f"{FP16_BYTES * values / row.size_bytes:.1f}",
            f"{row.quality.kld:.4f}",
            f"{row.quality.recall_kld:.4f}",
            f"{row.quality.top1:.1%}",
            f"{row.decode_s:.2f} s",
            f"{probe.prefill_s / row.decode_s:.1f}x",
        )
    return table
