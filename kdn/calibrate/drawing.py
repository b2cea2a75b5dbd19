"""Text of any size, without holding or tokenising more of it than is needed.

Of a long file only pieces are read, evenly spaced over it; of a packed one, only its beginning. Of
these, only as many blocks are tokenised as there are tokens to be read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdn.cache.keys import TokenIds
from kdn.calibrate.corpus import Text, text_of
from kdn.errors import FormatError

BYTES_PER_TOKEN = 32
"""Read for each token wanted: several times what any usual text needs, so that it is a fair part of
a longer one."""
LEAST_BYTES = 4_000_000
PIECE_BYTES = 1_000_000
CHARS_PER_TOKEN = 8
"""Tokenised for each token wanted: usual text has 3 to 5, some kinds more."""
BLOCK_CHARS = 400_000
"""A block is tokenised by itself: some 30 windows, of which at most one is lost at its end."""
_CONTINUES = range(0x80, 0xC0)
"""Bytes of UTF-8 that no character begins with."""


def open_texts(paths: Sequence[Path], num_tokens: int) -> list[Text]:
    """Enough of each file for calibration with `num_tokens`."""
    each = max(LEAST_BYTES, BYTES_PER_TOKEN * num_tokens // max(1, len(paths)))
    return [text_of(path, read_part(path, each)) for path in paths]


def read_part(path: Path, most_bytes: int) -> bytes:
    """All of a file, or pieces of it: whole lines where it has any."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                with gzip.open(file) as unpacked:
                    data = unpacked.read(most_bytes + 1)
                return data if len(data) <= most_bytes else _trimmed(data[:most_bytes], first=True)
            size = path.stat().st_size
            if size <= most_bytes:
                return file.read()
            pieces = []
            for start in _places(size, most_bytes, PIECE_BYTES):
                file.seek(start)
                pieces.append(_trimmed(file.read(PIECE_BYTES), first=start == 0))
            if path.suffix == ".jsonl":  # of a line that is longer than a piece, nothing is of use
                pieces = [piece for piece in pieces if piece.endswith(b"\n")]
            return b"\n".join(pieces)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{path}: expected UTF-8 text, plain or gzip: {error}") from error


def _places(size: int, wanted: int, piece: int) -> list[int]:
    """Where evenly spaced pieces begin."""
    count = max(1, wanted // piece)
    return [int(start) for start in np.linspace(0, max(0, size - piece), count)]


def _trimmed(piece: bytes, *, first: bool) -> bytes:
    """Without the lines that are cut at its ends; of one endless line, without cut characters."""
    begin = 0 if first else piece.find(b"\n") + 1
    end = piece.rfind(b"\n") + 1
    if end > begin:
        return piece[begin:end]
    while begin < len(piece) and piece[begin] in _CONTINUES:
        begin += 1
    return piece[begin:].decode("utf-8", errors="ignore").encode()


def drawn(texts: Sequence[Text], tokenizer: Any, num_tokens: int) -> list[TokenIds]:
    """Tokens of evenly spaced blocks of each text, about `num_tokens` and some more in all; short
    texts are taken whole, and long ones make up for them."""
    most = _share([len(text.content) for text in texts], CHARS_PER_TOKEN * num_tokens)
    found = []
    for text in texts:
        if len(text.content) <= max(most, BLOCK_CHARS):
            found.append(text.tokens(tokenizer))
            continue
        for start in _places(len(text.content), most, BLOCK_CHARS):
            block = text.content[start : start + BLOCK_CHARS]
            found.append(Text(text.name, block).tokens(tokenizer))
    return found


def _share(lengths: Sequence[int], wanted: int) -> int:
    """How much may be taken of each so that all together are `wanted`, or everything."""
    left, share = wanted, 0
    for index, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - index)
        left -= min(length, share)
    return share
