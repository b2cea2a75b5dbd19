"""How much of a join is computed anew."""

from __future__ import annotations

import pytest

from kdn.blend.shares import (
    COST,
    MOST,
    UNMEASURED,
    WHOLE,
    recompute_s,
    share_in_time,
    wanted_share,
)
from kdn.errors import UnsupportedError
from kdn.session.quality import codec_kld_in_join, enough_join_kld

SEAMS = {0.3: (0.01, 0.015), 0.0: (0.04, 0.07), 0.15: (0.02, 0.033), 0.05: (0.03, 0.045)}


def test_the_least_that_is_good_enough() -> None:
    assert [wanted_share(SEAMS, kld) for kld in (0.1, 0.07, 0.06, 0.04, 0.02)] == [
        0.0,
        0.0,
        0.05,
        0.15,
        0.3,
    ]
    assert wanted_share(SEAMS, 0.01) == WHOLE
    assert wanted_share(SEAMS, 0.0) == wanted_share({}, 1.0) == WHOLE


def test_without_seams() -> None:
    words = ("draft", "default", "high", "exact")
    shares = [wanted_share(UNMEASURED, enough_join_kld(word)) for word in words]
    assert shares == [0.15, 0.3, WHOLE, WHOLE]
    assert enough_join_kld(0.07) == pytest.approx(0.056)  # the codec takes the rest
    found = [codec_kld_in_join(one) for one in ("draft", "default", "exact", 0.07)]
    assert found == pytest.approx([0.02, 0.01, 0.0, 0.014])
    with pytest.raises(UnsupportedError, match="draft, default"):
        codec_kld_in_join("best")


def test_time_counts() -> None:
    assert share_in_time(0.15, 10.0, 100.0) == 0.15
    assert share_in_time(0.15, 10.0, 1.0) == 1.0 / (COST * 10)
    assert share_in_time(WHOLE, 10.0, 10.0) == WHOLE
    assert share_in_time(WHOLE, 10.0, 9.0) == MOST
    assert share_in_time(0.15, 10.0, -1.0) == 0.0
    assert share_in_time(0.15, 0.0, -1.0) == 0.15  # nobody knows how long it takes
    assert recompute_s(0.15, 10.0) == 0.15 * COST * 10
    assert recompute_s(WHOLE, 10.0) == 10.0
