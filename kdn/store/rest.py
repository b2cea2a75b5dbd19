"""A pause after failures, longer each time, until something works again."""

from __future__ import annotations

from random import Random

FIRST_REST_S = 0.02
LONGEST_REST_S = 1.0


class Rest:
    def __init__(self, first_s: float = FIRST_REST_S, longest_s: float = LONGEST_REST_S) -> None:
        self.until_s = 0.0
        self._first_s, self._longest_s = first_s, longest_s
        self._failures = 0
        self._failed_s = -1.0

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.until_s

    def failed(self, began_s: float, now_s: float, rng: Random) -> None:
        """A request that began then has failed. Those that failed together count once."""
        if began_s < self._failed_s:
            return
        rest_s = min(self._first_s * 2**self._failures, self._longest_s)
        self._failures = min(self._failures + 1, 30)
        self._failed_s = now_s
        self.until_s = now_s + rest_s * rng.uniform(0.5, 1.0)

    def worked(self) -> None:
        self._failures = 0
