"""Keys are a promise: the literal bytes below may never change."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdn.cache.keys import (
    CHUNK_TOKENS,
    HISTORY_TOKENS,
    KEY_BYTES,
    PUBLIC_SEAL_KEY,
    TAIL_MULTIPLE,
    Namespace,
    cut,
    tails,
)
from kdn.errors import MismatchError

SPACE = Namespace(model=bytes(range(16)), profile=b"profile")
TOKENS = np.arange(600) * 7 % 1000

GOLDEN_ROOT = "ee58d92887df7e85db0e32a3517a2e7f"
GOLDEN_KEYS = [
    "5c98fc8523402026704c08cf4d329bee",
    "93e199557b2ec04ac01ca63a3b4ace03",
    "be46fc2a196fd026e505ef221a3e6cc4",
]


def keys_of(tokens: object, namespace: Namespace = SPACE) -> list[str]:
    return [chunk.key.hex() for chunk in cut(tokens, namespace)]  # type: ignore[arg-type]


def test_golden() -> None:
    assert SPACE.root.hex() == GOLDEN_ROOT
    assert keys_of(TOKENS) == GOLDEN_KEYS


def test_the_seal_key_follows_from_the_secret_alone() -> None:
    tenant = replace(SPACE, secret=b"a tenant's own")
    keys = {space: cut(TOKENS, space)[0].seal_key for space in (SPACE, tenant)}
    assert keys[SPACE] == PUBLIC_SEAL_KEY
    assert keys[tenant] == cut(TOKENS, replace(tenant, model=b"another"))[-1].seal_key
    assert keys[tenant] != keys[SPACE]
    assert keys[tenant].hex() not in repr(cut(TOKENS, tenant)[0])


def test_equal_in_another_process() -> None:
    code = (
        "from kdn.cache.keys import Namespace, cut; import sys;"
        "space = Namespace(bytes(range(16)), b'profile');"
        "sys.stdout.write(' '.join(c.key.hex() for c in cut([i * 7 % 1000 for i in range(600)],"
        " space)))"
    )
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.split() == GOLDEN_KEYS


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32, ">i4"])
def test_dtype_of_the_tokens_does_not_matter(dtype: str) -> None:
    assert keys_of(TOKENS.astype(dtype)) == GOLDEN_KEYS
    assert keys_of(TOKENS.tolist()) == GOLDEN_KEYS
    assert keys_of(np.repeat(TOKENS.astype(dtype), 2)[::2]) == GOLDEN_KEYS


def test_whatever_changes_the_values_changes_every_key() -> None:
    spaces = [
        SPACE,
        Namespace(bytes(16), b"profile"),
        Namespace(bytes(range(16)), b"other"),
        Namespace(bytes(range(16)), b"profile", secret=b"tenant"),
        SPACE.with_lora(b"x"),
        SPACE.with_salt(b"x"),
        SPACE.with_salt(b"y"),
        SPACE.with_salt(b"x").with_lora(b"x"),
        # Parts must not run into each other.
        Namespace(bytes(range(16)) + b"p", b"rofile"),
    ]
    seen = [key for space in spaces for key in keys_of(TOKENS, space)]
    assert len(set(seen)) == len(spaces) * len(GOLDEN_KEYS)


def test_order_of_extras_does_not_matter() -> None:
    one, other = SPACE.with_lora(b"a").with_salt(b"b"), SPACE.with_salt(b"b").with_lora(b"a")
    assert one.root == other.root


def test_a_secret_is_not_shown() -> None:
    assert "tenant" not in repr(Namespace(b"m", b"p", secret=b"tenant"))


@pytest.mark.parametrize("secret", [b"", bytes(65)])
def test_impossible_secrets_are_refused(secret: bytes) -> None:
    with pytest.raises(MismatchError, match="1 to 64 bytes"):
        Namespace(b"m", b"p", secret=secret)


def test_chunks_cover_the_context_in_order() -> None:
    chunks = cut(TOKENS, SPACE)
    assert [(c.start, c.end) for c in chunks] == [(0, 256), (256, 512), (512, 592)]
    assert chunks[0].parent == SPACE.root
    assert all(b.parent == a.key for a, b in pairwise(chunks))
    assert all(len(c.key) == KEY_BYTES for c in chunks)
    assert np.array_equal(np.concatenate([c.tokens for c in chunks]), TOKENS[:592])
    assert [len(c.history) for c in chunks] == [0, HISTORY_TOKENS, HISTORY_TOKENS]
    assert np.array_equal(chunks[2].history, TOKENS[512 - HISTORY_TOKENS : 512])


@pytest.mark.parametrize("count", [0, 1, 15])
def test_fewer_tokens_than_a_tail_have_no_chunk(count: int) -> None:
    assert cut(TOKENS[:count], SPACE) == []


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=600),
    st.integers(0, 599),
    st.integers(0, 2**32 - 1),
)
def test_a_key_stands_for_its_whole_prefix(tokens: list[int], place: int, token: int) -> None:
    place %= len(tokens)
    changed = [*tokens[:place], token, *tokens[place + 1 :]]
    for one, other in zip(cut(tokens, SPACE), cut(changed, SPACE), strict=True):
        same = tokens[: one.end] == changed[: one.end]
        assert (one.key == other.key) == same


@pytest.mark.parametrize("tokens", [[1, -1, 3], np.array([-100]), [1 << 32], [[1, 2]], [1.5, 2.0]])
def test_what_is_no_token_is_refused(tokens: object) -> None:
    with pytest.raises(MismatchError, match="token ids"):
        cut(tokens, SPACE)  # type: ignore[arg-type]


def test_tails_come_longest_first() -> None:
    chunks = cut(TOKENS, SPACE)
    found = list(tails(TOKENS, SPACE, chunks[1]))
    assert [c.num_tokens for c in found] == [80, 64, 48, 32, 16]
    assert all(c.start == 512 and c.parent == chunks[1].key for c in found)
    assert found[0].key == chunks[2].key
    assert np.array_equal(found[0].history, chunks[2].history)


def test_tails_of_an_unknown_full_chunk() -> None:
    """A shorter prompt may have left a tail where this context has a full chunk."""
    for after, start in [(None, 0), (cut(TOKENS, SPACE)[0], 256)]:
        found = list(tails(TOKENS, SPACE, after))
        assert [c.num_tokens for c in found] == list(range(240, 0, -16))
        assert {c.start for c in found} == {start}


@pytest.mark.parametrize("count", range(0, 3 * CHUNK_TOKENS, 40))
def test_tails_find_what_a_shorter_prompt_left(count: int) -> None:
    left = cut(TOKENS[:count], SPACE)
    known = {c.key for c in left}
    hits = [c for c in cut(TOKENS, SPACE) if c.num_tokens == CHUNK_TOKENS and c.key in known]
    tail = next(
        (c for c in tails(TOKENS, SPACE, hits[-1] if hits else None) if c.key in known), None
    )
    found = sum(c.num_tokens for c in hits) + (tail.num_tokens if tail else 0)
    assert found == min(count, len(TOKENS)) // TAIL_MULTIPLE * TAIL_MULTIPLE


def test_nothing_follows_a_tail() -> None:
    with pytest.raises(MismatchError, match="full chunk"):
        list(tails(TOKENS, SPACE, cut(TOKENS, SPACE)[2]))
