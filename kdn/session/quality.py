"""How good a delivery must be, in words or as a number.

A number is the mean KL divergence, in nats a token, that is enough: no more is fetched. What a
level is worth is known from calibration, on other text, so the default asks for a third of 0.01. On
contexts of 3,072 tokens of WikiText, a manual, an RFC and a novel, SmolLM2's predictions were then
off by .0031, .0030, .0085 and .0034, and its most likely next token was the same in 97 % of all
places. Asked for 0.01, they were off by .0071, .0091, .0128 and .0061, in less than half the bytes.

A join of pieces that were learned apart (`kdn/blend/`) is off by more than any codec. So the words
have a meaning of their own there, and pieces need not be loaded as well as a context of their own;
a number means the same everywhere.
"""

from __future__ import annotations

from kdn.checked import checked_number, shown
from kdn.errors import UnsupportedError

QUALITIES = {"draft": 0.03, "default": 0.0035, "high": 0.001, "exact": 0.0}

JOIN_QUALITIES = {"draft": 0.1, "default": 0.05, "high": 0.025, "exact": 0.0}
"""Of joins: enough over the first tokens of an answer."""
CODEC_SHARE = 0.2
"""Of what a join may cost in all, the codec's part. With less, most of the time of a join would go
into a precision that joining loses again."""

MAX_KLD = 3600.0
"""More nats than any difference."""

Quality = str | float


def enough_kld(quality: Quality) -> float:
    """The KLD that is enough. 0: every level there is, which of `klt` is as good as exact."""
    if isinstance(quality, str):
        if quality not in QUALITIES:
            raise UnsupportedError(
                f"expected a quality of {', '.join(QUALITIES)} or a KLD, found {shown(quality)}"
            )
        return QUALITIES[quality]
    return checked_number("quality as a KLD", quality, 0, MAX_KLD)


def enough_join_kld(quality: Quality) -> float:
    """The KLD that joining may add; 0: everything is read. A number is shared with the codec."""
    enough = enough_kld(quality)
    return JOIN_QUALITIES[quality] if isinstance(quality, str) else (1 - CODEC_SHARE) * enough


def codec_kld_in_join(quality: Quality) -> float:
    """How well the pieces of a join are to be loaded."""
    enough = enough_kld(quality)
    return CODEC_SHARE * (JOIN_QUALITIES[quality] if isinstance(quality, str) else enough)
