"""How soon objects are used again, learnt from those that were.

Time counts uses of any object. For each class (used once, twice, more often) and age since the last
use, in octaves, it counts how many objects reached that age and how many were used at it; objects
that were evicted are remembered for a while (see `cost`), so what is learnt does not depend on what
was kept. From these follows the index of an object: the best ratio of (chance of being used by
then) to (expected wait until then), over all moments to wait for. That is Gittins' index: to keep
the objects of highest index is to get the most uses out of the room. Unlike recency it knows that
a conversation just answered is not used again at once, and when it is not worth waiting any longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate

CLASSES = 3
AGES = 32  # octave b is the ages [2**(b - 1), 2**b)
PRIOR_OBJECTS = 64.0
"""So many objects like the average one are in each count from the beginning."""
FORGET = 1 / 16
"""Part of what is known that is forgotten each time the index is computed."""


class Reuse:
    def __init__(self) -> None:
        self._reached = [[0.0] * AGES for _ in range(CLASSES)]
        self._used = [[0.0] * AGES for _ in range(CLASSES)]
        self._waiting: list[list[deque[tuple[int, bytes]]]] = [
            [deque() for _ in range(AGES)] for _ in range(CLASSES)
        ]
        self._index = [[0.0] * AGES for _ in range(CLASSES)]
        self.learn(0, lambda key: None)

    def began(self, key: bytes, uses: int, now: int) -> None:
        """An object was used for the `uses`-th time; its next use is awaited."""
        group = min(uses, CLASSES) - 1
        self._reached[group][0] += 1
        self._waiting[group][0].append((now, key))

    def ended(self, uses: int, age: int) -> None:
        """An object was used again `age` after its `uses`-th use."""
        self._used[min(uses, CLASSES) - 1][min(age.bit_length(), AGES - 1)] += 1

    def index(self, uses: int, age: int) -> float:
        """Uses per unit of time to be expected of an object, if it is kept as long as is best."""
        row, octave = self._index[min(uses, CLASSES) - 1], min(age.bit_length(), AGES - 2)
        part = min(age / (1 << octave) * 2 - 1, 1.0) if age else 0.0
        return row[octave] * (1 - part) + row[octave + 1] * part

    def learn(self, now: int, last_use: Callable[[bytes], int | None]) -> None:
        """Count who grew older, then compute the index anew. `last_use` is that of a key still
        known."""
        for group in range(CLASSES):
            self._grow_older(group, now, last_use)
        reached = [sum(column) for column in zip(*self._reached, strict=True)]
        used = [sum(column) for column in zip(*self._used, strict=True)]
        # As long as nothing is known, a use is the less likely the longer the last one is ago.
        usual = [(used[b] + 0.1) / (reached[b] + 0.1 * (b + 2)) for b in range(AGES)]
        for group in range(CLASSES):
            chances = [
                min(1.0, (u + PRIOR_OBJECTS * p) / (r + PRIOR_OBJECTS))
                for u, r, p in zip(self._used[group], self._reached[group], usual, strict=True)
            ]
            self._index[group] = [_best_ratio(chances, octave) for octave in range(AGES)]
        for row in (*self._reached, *self._used):
            row[:] = [count * (1 - FORGET) for count in row]

    def _grow_older(self, group: int, now: int, last_use: Callable[[bytes], int | None]) -> None:
        """Oldest first, so that each queue stays in order."""
        queues, arrivals = self._waiting[group], [0] * (AGES + 1)
        for octave in range(AGES - 2, -1, -1):
            queue = queues[octave]
            while queue and now - queue[0][0] >= 1 << octave:
                since, key = queue.popleft()
                if last_use(key) == since:
                    new = min((now - since).bit_length(), AGES - 1)
                    arrivals[octave + 1] += 1  # in all octaves from here
                    arrivals[new + 1] -= 1  # to there
                    queues[new].append((since, key))
        for octave, count in enumerate(accumulate(arrivals[:AGES])):
            self._reached[group][octave] += count


def _best_ratio(chances: list[float], first: int) -> float:
    """From the middle of octave `first` on, waiting to the end of the octave that is best."""
    alive, wait, uses, best = 1.0, 0.0, 0.0, 0.0
    for octave in range(first, AGES):
        width = (1 << max(octave - 1, 0)) * (0.5 if octave == first else 1.0)
        chance = chances[octave]
        wait += width * alive * (1 - chance / 2)
        uses += alive * chance
        alive *= 1 - chance
        best = max(best, uses / wait)
    return best
