"""What a delivery brought, chunk by chunk, and what may be published on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kdn.cache.keys import Chunk
from kdn.delivery.request import Result, enough_levels, worst_kld

TIERS = ("host", "folder", "remote")


class Grade(NamedTuple):
    """How good a chunk's values in a sink are."""

    kld: float
    """Expected KL divergence when the model continues from them; 0 if the model computed them."""
    is_exact: bool
    """Whether the model computed them, or every level was loaded, which is as good as lossless with
    `klt`. Values computed on top of exact ones may be published."""
    levels: int
    """How many levels were loaded; none if the model computed them for this sink."""

    @classmethod
    def of_levels(cls, levels: int, expected_kld: Sequence[float]) -> Grade:
        """The grade of a stream's first levels; the codec expects `expected_kld` of each number."""
        return cls(expected_kld[levels - 1], levels == len(expected_kld), levels)

    @classmethod
    def of_values(cls, kld: float, is_exact: bool, expected_kld: Sequence[float]) -> Grade:
        """The grade of values that another process loaded or computed; computed counts as exact."""
        every = len(expected_kld)
        return cls(kld, is_exact, every if is_exact else enough_levels(expected_kld, kld))


COMPUTED = Grade(0.0, True, 0)
"""The grade of values that the model computed for this sink."""


@dataclass(frozen=True)
class Delivered:
    chunks: tuple[Chunk, ...]
    held: tuple[Grade, ...]
    """Grades of the first chunks, which this host held: decoded, or, for an engine on a GPU, as
    streams."""
    result: Result | None
    """The result for the chunks that were fetched; None if none were."""
    expected_kld: Sequence[float]

    @property
    def grades(self) -> list[Grade | None]:
        """The grade of each chunk; None where the sink does not hold it."""
        if self.result is None:
            return [*self.held, *[None] * (len(self.chunks) - len(self.held))]
        levels, computed = self.result.levels, self.result.computed
        return [*self.held, *map(self._grade, levels, computed)]

    def _grade(self, levels: int, computed: bool) -> Grade | None:
        if computed:
            return COMPUTED
        return Grade.of_levels(levels, self.expected_kld) if levels else None

    @property
    def num_ready(self) -> int:
        """Number of leading chunks that the model need not read."""
        grades = self.grades
        return grades.index(None) if None in grades else len(grades)

    @property
    def ready_until(self) -> int:
        """The model need not read the tokens before this one."""
        ready = self.num_ready
        return self.chunks[ready].start if ready < len(self.chunks) else self.chunks[-1].end

    def good_until(self, end: int, enough_kld: float) -> int:
        """The same, of a context up to `end`, where coarser chunks than that do not count."""
        for chunk, grade in zip(self.chunks, self.grades, strict=True):
            if grade is None or grade.kld > worst_kld(chunk, end, enough_kld):
                return chunk.start
        return self.chunks[-1].end

    @property
    def exact_until(self) -> int | None:
        """Tokens from here on were loaded with losses, or will be computed on top of such; None:
        nothing that was loaded has any."""
        for chunk, grade in zip(self.chunks, self.grades, strict=True):
            if grade is not None and not grade.is_exact:
                return chunk.start
        return None

    @property
    def levels(self) -> tuple[int, ...]:
        """Of each chunk; 0 where the model read it, or has to."""
        held = tuple(grade.levels for grade in self.held)
        rest = (0,) * (len(self.chunks) - len(held))
        return held + (self.result.levels if self.result else rest)

    @property
    def num_loaded_tokens(self) -> int:
        both = zip(self.chunks, self.levels, strict=True)
        return sum(chunk.num_tokens for chunk, levels in both if levels)

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """Where loaded tokens came from: this host's memory, a folder, or a place elsewhere."""
        held = sum(chunk.num_tokens for chunk in self.chunks[: len(self.held)])
        found = dict.fromkeys(TIERS, 0) | {"host": held}
        for source in self.result.account.sources if self.result else ():
            found["folder" if source.is_local else "remote"] += source.num_tokens
        return found

    @property
    def level_bytes(self) -> tuple[int, ...]:
        """Bytes of each level that came from places."""
        return self.result.account.level_bytes if self.result else ()

    @property
    def done_s(self) -> float:
        return self.result.done_s if self.result else 0.0

    @property
    def fetched_bytes(self) -> int:
        return self.result.fetched_bytes if self.result else 0

    @property
    def troubles(self) -> tuple[str, ...]:
        return self.result.troubles if self.result else ()


def may_be_published(chunk: Chunk, exact_until: int | None) -> bool:
    """**No generation loss**: a chunk is published only if everything before it was computed by the
    model or loaded without loss; its values would otherwise carry somebody's losses on to
    everybody."""
    return exact_until is None or chunk.end <= exact_until
