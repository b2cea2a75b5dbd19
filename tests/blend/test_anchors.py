"""A text has the same anchors wherever it stands, and others under another secret."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kdn.blend.anchors import SPACING, WINDOW, anchor_keys, anchors_of
from kdn.cache.keys import Namespace, TokenIds, token_ids

NAMESPACE = Namespace(b"m" * 16, b"p" * 16, secret=b"a secret")
RNG = np.random.default_rng(17)


def text(num_tokens: int) -> TokenIds:
    return token_ids(RNG.integers(0, 49152, num_tokens))


def keyed(tokens: TokenIds, namespace: Namespace = NAMESPACE) -> list[tuple[int, bytes]]:
    starts = anchors_of(tokens, namespace.secret)
    return list(zip(starts, anchor_keys(tokens, starts, namespace), strict=True))


@pytest.mark.parametrize("shift", [0, 1, 15, 16, 17, 255, 4096])
def test_a_text_that_was_moved_has_the_same_anchors(shift: int) -> None:
    own = text(2000)
    around = np.concatenate([text(shift), own, text(100)])
    moved = {(start - shift, key) for start, key in keyed(around)}
    within = {one for one in moved if 0 <= one[0] <= len(own) - WINDOW}
    assert within == set(keyed(own))
    assert within


def test_a_changed_token_moves_no_anchor_but_those_around_it() -> None:
    own = text(4000)
    changed = own.copy()
    changed[2000] += 1
    differ = set(keyed(own)) ^ set(keyed(changed))
    assert all(2000 - WINDOW < start <= 2000 for start, _ in differ)


def test_the_order_of_tokens_counts() -> None:
    own = text(100_000)
    starts = set(anchors_of(own, NAMESPACE.secret))
    mirrored = {len(own) - WINDOW - at for at in anchors_of(own[::-1].copy(), NAMESPACE.secret)}
    expected = len(own) / SPACING**2
    assert len(starts & mirrored) < 2 * expected


def test_about_one_in_so_many_positions_is_an_anchor() -> None:
    found = len(anchors_of(text(200_000), NAMESPACE.secret))
    assert found == pytest.approx(200_000 / SPACING, rel=0.06)


def test_others_cannot_tell_where_anchors_are() -> None:
    own = text(100_000)
    here, there = (set(anchors_of(own, secret)) for secret in (b"a secret", b"another"))
    assert len(here & there) < 2 * len(own) / SPACING**2


def test_keys_depend_on_secret_model_and_profile() -> None:
    own = text(100)
    others = [
        replace(NAMESPACE, **change)
        for change in ({}, {"secret": b"other"}, {"model": b"n" * 16}, {"profile": b"q" * 16})
    ]
    keys = [anchor_keys(own, [3], one)[0] for one in others]
    assert len(set(keys)) == 4
    assert anchor_keys(own[3:], [0], NAMESPACE) == keys[:1]


@pytest.mark.parametrize("num_tokens", [0, 1, WINDOW - 1])
def test_what_is_shorter_than_a_window_has_none(num_tokens: int) -> None:
    assert anchors_of(text(num_tokens), NAMESPACE.secret) == []


def test_one_window_is_an_anchor_or_not() -> None:
    found = [anchors_of(text(WINDOW), NAMESPACE.secret) for _ in range(1000)]
    assert {tuple(one) for one in found} == {(), (0,)}


def test_keys_are_a_promise() -> None:
    """Whoever changes them loses all anchors that were ever shared."""
    tokens = token_ids(list(range(1000)))
    assert anchors_of(tokens, b"a secret")[:3] == [27, 130, 206]
    assert anchor_keys(tokens, [7], NAMESPACE)[0].hex() == "8f93bd60f4d341bf2ac4a6eab26174d7"
