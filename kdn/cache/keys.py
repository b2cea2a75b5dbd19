"""Tokens and a model to stable names.

A context is cut into chunks of `CHUNK_TOKENS`; each is named by a keyed BLAKE2b over its parent's
key and its token ids, so a key stands for the whole prefix. Keys are equal in every process and
run, and nobody without the tenant's secret can compute or probe them. From the same secret comes
the key that streams are sealed with: a holder can tell which streams another holder wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kdn.errors import MismatchError

CHUNK_TOKENS = 256
TAIL_MULTIPLE = 16
FORMAT_VERSION = 2
"""Of the bitstream (`docs/format.md`). It is part of every key, so that readers and writers of two
versions never find, let alone replace, each other's streams."""
KEY_BYTES = 16
SEAL_KEY_BYTES = 32
HISTORY_TOKENS = 64
MAX_SECRET_BYTES = 64
PUBLIC_SECRET = b"kdn public namespace"
"""What everybody knows: chunks under it are found and sealed by anybody."""

TokenIds = npt.NDArray[np.uint32]
Tokens = Sequence[int] | npt.NDArray[np.integer]


def seal_key(secret: bytes) -> bytes:
    """The key of the seals on what is published under this secret."""
    return blake2b(key=secret, digest_size=SEAL_KEY_BYTES, person=b"kdn-seal-key").digest()


PUBLIC_SEAL_KEY = seal_key(PUBLIC_SECRET)


@dataclass(frozen=True)
class Namespace:
    """Whatever else than the tokens changes the values of a cache, and the tenant's secret."""

    model: bytes
    profile: bytes
    extra: tuple[bytes, ...] = ()
    secret: bytes = field(default=PUBLIC_SECRET, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.secret) <= MAX_SECRET_BYTES:
            raise MismatchError(
                f"a secret must have 1 to {MAX_SECRET_BYTES} bytes, found {len(self.secret)}"
            )

    def with_lora(self, adapter: bytes) -> Namespace:
        """Under a LoRA adapter, named by a digest of its weights."""
        return replace(self, extra=(*self.extra, b"lora:" + adapter))

    def with_salt(self, salt: bytes) -> Namespace:
        """Shared only among requests that bring the same salt."""
        return replace(self, extra=(*self.extra, b"salt:" + salt))

    def with_cache(self, kind: bytes) -> Namespace:
        """Computed on top of a cache of another kind than the model's own."""
        return replace(self, extra=(*self.extra, b"cache:" + kind))

    @cached_property
    def seal_key(self) -> bytes:
        """See `seal_key`."""
        return seal_key(self.secret)

    @property
    def root(self) -> bytes:
        """The parent key of a context's first chunk. The order of `extra` does not count."""
        digest = blake2b(key=self.secret, digest_size=KEY_BYTES, person=b"kdn-root")
        version = FORMAT_VERSION.to_bytes(2, "little")
        for part in (version, self.model, self.profile, *sorted(self.extra)):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
        return digest.digest()


@dataclass(frozen=True)
class Chunk:
    """Up to CHUNK_TOKENS consecutive tokens of a context, and where they stand in it.

    `history` holds the (at most HISTORY_TOKENS) ids directly before them: a codec may predict from
    them. It is shorter at the beginning of a context. Its stream is sealed with `seal_key`.
    """

    key: bytes
    parent: bytes
    start: int
    tokens: TokenIds
    history: TokenIds
    seal_key: bytes = field(repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def with_seal_key(self, seal_key: bytes) -> Chunk:
        """The same, sealed with another key."""
        return Chunk(self.key, self.parent, self.start, self.tokens, self.history, seal_key)


def cut(tokens: Tokens, namespace: Namespace, *, whole: bool = False) -> list[Chunk]:
    """Cut a context into named chunks. A last partial chunk is kept as far as it is a multiple of
    TAIL_MULTIPLE tokens; what is left over after it has no chunk. `whole`: it is kept as it is, for
    those who know where the context ends; nobody finds it by reading further."""
    ids = token_ids(tokens)
    usable = len(ids) if whole else len(ids) - len(ids) % TAIL_MULTIPLE
    chunks: list[Chunk] = []
    parent = namespace.root
    for start in range(0, usable, CHUNK_TOKENS):
        chunk = _chunk(ids, start, min(start + CHUNK_TOKENS, usable), parent, namespace)
        chunks.append(chunk)
        parent = chunk.key
    return chunks


def tails(tokens: Tokens, namespace: Namespace, after: Chunk | None) -> Iterator[Chunk]:
    """The partial chunks that may be known directly after the last full chunk that is (None: not
    even the first is), from longest to shortest: the first that is found is the one to take.

    A shorter prompt, now the beginning of this one, may have left any of them.
    """
    if after is not None and after.num_tokens != CHUNK_TOKENS:
        raise MismatchError(f"only a full chunk has successors, found {after.num_tokens} tokens")
    ids = token_ids(tokens)
    start, parent = (after.end, after.key) if after else (0, namespace.root)
    longest = min(len(ids) - start, CHUNK_TOKENS - 1) // TAIL_MULTIPLE * TAIL_MULTIPLE
    for length in range(longest, 0, -TAIL_MULTIPLE):
        yield _chunk(ids, start, start + length, parent, namespace)


def chunk_key(parent: bytes, tokens: TokenIds, secret: bytes) -> bytes:
    """Name of the chunk holding `tokens` after the chunk named `parent`."""
    digest = blake2b(key=secret, digest_size=KEY_BYTES, person=b"kdn-chunk")
    digest.update(parent)
    digest.update(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
    return digest.digest()


def _chunk(ids: TokenIds, start: int, end: int, parent: bytes, namespace: Namespace) -> Chunk:
    key = chunk_key(parent, ids[start:end], namespace.secret)
    history = ids[max(0, start - HISTORY_TOKENS) : start]
    return Chunk(key, parent, start, ids[start:end], history, namespace.seal_key)


def token_ids(tokens: Tokens) -> TokenIds:
    """Little-endian u32; a negative id (a placeholder) would silently become another token."""
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.zeros(0, dtype="<u4")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise MismatchError(f"token ids must be one row of integers, found {ids.dtype} {ids.shape}")
    if ids.min() < 0 or ids.max() >= 1 << 32:
        raise MismatchError(f"token ids must be in [0, 2**32), found {ids.min()} to {ids.max()}")
    return np.ascontiguousarray(ids, dtype="<u4")
