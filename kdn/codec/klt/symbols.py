"""Quantised components as nested levels, and how they are modelled: the readable reference.

**Nesting.** A component is rounded once, to the finest step. A coarser level is that integer
divided by 3 and rounded to nearest: uniform quantisers with a step ratio of 3 nest exactly, and
every level is the plain uniform quantiser one would use if it were the only one. So level 0 codes
a small signed integer, and each further level one ternary digit: -1, 0 or +1.

**Model.** Every table is static and chosen by integers both sides know:

- the component's scale class, shifted by the token's step class;
- the token's activity: how large its components of the last few blocks were, against thresholds
  calibrated for that block. It changes every BLOCK components, not with every symbol;
- at a refinement, also what the level before says: of the component itself (zero, one, more) and
  of the same component in the neighbouring tokens, before and after.

Arrays are `[components, tokens]`: all tokens of one component are coded before the next component,
token t in lane t mod lanes, so that lanes work on one component at a time (`rans.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdn.codec import rans
from kdn.codec.format import Buffer
from kdn.errors import TruncatedError

BLOCK = 8
NUM_ACTIVITIES = 8
NUM_SCALES = 64
NUM_NEIGHBOURS = 3
BASE_ALPHABET = 16
DIGIT_ALPHABET = 3
ESCAPE = BASE_ALPHABET - 1
LARGEST_PLAIN = (ESCAPE - 1) // 2
MAX_BASE = 32767
LANES = 32
MAX_RUNS = 64
"""Runs of a section (`runs.py`); so few that a GPU finds each of them in one step."""

BASE_TABLES = NUM_SCALES * NUM_ACTIVITIES
ZERO_TABLES = NUM_SCALES * NUM_ACTIVITIES * NUM_NEIGHBOURS
DIGIT_TABLES = ZERO_TABLES + NUM_SCALES * 2

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Model:
    """What selects the tables of one level of one group, besides what was decoded before.

    `scales` [components] and `shifts` [tokens] add up to the scale class; `thresholds`
    [blocks, NUM_ACTIVITIES - 1] cut a token's activity into classes; `cdf` [tables, alphabet + 1].
    """

    scales: npt.NDArray[np.uint8]
    shifts: npt.NDArray[np.int8]
    thresholds: Ints
    cdf: npt.NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), len(self.shifts)

    @property
    def num_lanes(self) -> int:
        return min(LANES, len(self.shifts))


def no_activity(num_rows: int) -> Ints:
    """Thresholds that no activity reaches: all of a section's tokens share one class."""
    return np.full((-(-num_rows // BLOCK), NUM_ACTIVITIES - 1), 2**31 - 1, dtype=np.int32)


def split_levels(finest: Ints, num_levels: int) -> list[Ints]:
    """The integer of every level, coarse to fine; the last is `finest`."""
    levels = [finest]
    for _ in range(num_levels - 1):
        levels.append(np.floor_divide(levels[-1] + 1, 3).astype(np.int32))
    return levels[::-1]


def base_symbol(q: int) -> int:
    """0, -1, +1, -2, +2, ... as 0, 1, 2, 3, 4, ...; anything larger is the escape."""
    if abs(q) > LARGEST_PLAIN:
        return ESCAPE
    return 2 * q if q > 0 else -2 * q - (q < 0)


def base_value(symbol: int) -> int:
    return symbol // 2 if symbol % 2 == 0 else -(symbol + 1) // 2


def digit_symbol(coarse: int, fine: int) -> int:
    """The digit as 0, 1 (towards zero; minus where `coarse` is zero), 2 (the other way)."""
    digit = (fine - 3 * coarse) * (-1 if coarse < 0 else 1)
    return (1, 0, 2)[digit + 1]


def digit_value(coarse: int, symbol: int) -> int:
    digit = (0, -1, 1)[symbol]
    return 3 * coarse + (-digit if coarse < 0 else digit)


class Activity:
    """The running size of each token's components, and its class in the current block."""

    def __init__(self, model: Model) -> None:
        self._thresholds = model.thresholds
        self._sum = np.zeros(model.shape[1], dtype=np.int64)
        self._block = np.zeros(model.shape[1], dtype=np.int64)
        self.classes = np.zeros(model.shape[1], dtype=np.int64)

    def enter(self, component: int) -> None:
        if component % BLOCK == 0:
            self._sum += 16 * self._block - (self._sum >> 3)
            self._block[:] = 0
            bounds = self._thresholds[component // BLOCK]
            self.classes = (self._sum[:, None] >= bounds[None, :]).sum(axis=1)

    def add(self, token: int, q: int) -> None:
        self._block[token] += min(abs(q), 3)


def scale_class(model: Model, component: int, token: int) -> int:
    return min(max(int(model.scales[component]) + int(model.shifts[token]), 0), NUM_SCALES - 1)


def base_table(model: Model, activity: Activity, component: int, token: int) -> int:
    scale = scale_class(model, component, token)
    return scale * NUM_ACTIVITIES + int(activity.classes[token])


def digit_table(model: Model, activity: Activity, coarse: Ints, component: int, token: int) -> int:
    scale, own = scale_class(model, component, token), abs(int(coarse[component, token]))
    if own:
        return ZERO_TABLES + scale * 2 + (own > 1)
    row = coarse[component]
    near = int(token > 0 and row[token - 1] != 0)
    near += int(token + 1 < len(row) and row[token + 1] != 0)
    return (scale * NUM_ACTIVITIES + int(activity.classes[token])) * NUM_NEIGHBOURS + near


def encode(model: Model, values: Ints, coarse: Ints | None) -> bytes:
    """One level of one group: `values` [components, tokens], given the level before."""
    coded: list[tuple[int, int, int]] = []  # (table, symbol, value) in the decoder's order
    activity = Activity(model)
    for c, t in np.ndindex(*values.shape):
        if t == 0:
            activity.enter(c)
        value = int(values[c, t])
        if coarse is None:
            coded.append((base_table(model, activity, c, t), base_symbol(value), value))
        else:
            symbol = digit_symbol(int(coarse[c, t]), value)
            coded.append((digit_table(model, activity, coarse, c, t), symbol, value))
        activity.add(t, value)
    states, words = [rans.STATE_LOW] * model.num_lanes, []
    for index in range(len(coded) - 1, -1, -1):
        table, symbol, value = coded[index]
        if coarse is None and symbol == ESCAPE:
            words.append(value & 0xFFFF)
        lane = (index % values.shape[1]) % model.num_lanes
        low, high = int(model.cdf[table, symbol]), int(model.cdf[table, symbol + 1])
        if states[lane] >= (high - low) << 18:
            words.append(states[lane] & 0xFFFF)
            states[lane] >>= 16
        quotient, rest = divmod(states[lane], high - low)
        states[lane] = (quotient << rans.PROB_BITS) + low + rest
    return np.array(states, "<u4").tobytes() + np.array(words[::-1], "<u2").tobytes()


def decode(model: Model, data: Buffer, coarse: Ints | None) -> Ints:
    """The inverse of `encode`."""
    states_in, words = rans.split_stream(data, model.num_lanes)
    states, used = [int(x) for x in states_in], 0
    values = np.zeros(model.shape, dtype=np.int32)
    activity = Activity(model)

    def next_word() -> int:
        nonlocal used
        if used == len(words):
            raise TruncatedError(f"expected more than {len(words)} words in a section")
        used += 1
        return int(words[used - 1])

    for c, t in np.ndindex(*values.shape):
        if t == 0:
            activity.enter(c)
        if coarse is None:
            table = base_table(model, activity, c, t)
        else:
            table = digit_table(model, activity, coarse, c, t)
        lane, row = t % model.num_lanes, model.cdf[table]
        slot = states[lane] & (rans.PROB_TOTAL - 1)
        symbol = int(np.searchsorted(row[1:], slot, side="right"))
        low, high = int(row[symbol]), int(row[symbol + 1])
        states[lane] = (high - low) * (states[lane] >> rans.PROB_BITS) + slot - low
        if states[lane] < rans.STATE_LOW:
            states[lane] = states[lane] << 16 | next_word()
        if coarse is not None:
            values[c, t] = digit_value(int(coarse[c, t]), symbol)
        elif symbol == ESCAPE:
            values[c, t] = np.array(next_word(), "<u2").view("<i2")
        else:
            values[c, t] = base_value(symbol)
        activity.add(t, int(values[c, t]))
    rans.check_end(used, len(words), np.array(states, dtype=np.uint32))
    return values
