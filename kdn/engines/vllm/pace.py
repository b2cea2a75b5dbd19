"""How fast this engine computes prompts, as its steps show: for what loads have saved."""

from __future__ import annotations

from collections import deque

LEAST_TOKENS = 64
"""Steps with fewer are mostly for answers, and say little about prompts."""
STEPS = 32


class Pace:
    """The best of the last steps: others had to wait for something. So what is made of it is rather
    too little than too much."""

    def __init__(self) -> None:
        self._token_s: deque[float] = deque(maxlen=STEPS)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step took so long until the next one began."""
        if num_tokens >= LEAST_TOKENS and seconds > 0:
            self._token_s.append(seconds / num_tokens)

    def seconds(self, num_tokens: int) -> float:
        """To compute so many tokens of a prompt; 0 as long as nobody can tell."""
        return num_tokens * min(self._token_s, default=0.0)
