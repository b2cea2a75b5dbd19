"""What an encoder on a GPU writes: where in one buffer of words each section of a batch has its
room, and how all of them come to the host in one copy. Plain torch and NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kdn.codec.directory import Line, section_code

Longs = npt.NDArray[np.int64]


def send(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """To the device in the current stream, without waiting for what is in it."""
    found = torch.from_numpy(np.ascontiguousarray(array))
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


@dataclass(frozen=True)
class Room:
    """For one kind of section, of some `chunks` (their numbers in the batch) and of all groups that
    have such a section: `sizes` [group] is how many rows each has. Sections lie
    [chunk, group, capacity], from `first_word` and, counted as sections, from `first_section`."""

    level: int
    kind: int
    sizes: tuple[int, ...]
    chunks: tuple[int, ...]
    capacity: int
    first_section: int
    first_word: int

    @property
    def num_sections(self) -> int:
        return len(self.chunks) * len(self.sizes)

    @property
    def sections(self) -> slice:
        return slice(self.first_section, self.first_section + self.num_sections)

    @property
    def words(self) -> slice:
        return slice(self.first_word, self.first_word + self.num_sections * self.capacity)


class Sheet:
    """Rooms of a batch, one after the other."""

    def __init__(self) -> None:
        self.rooms: list[Room] = []
        self.num_sections = self.num_words = 0

    def add(
        self, level: int, kind: int, sizes: Sequence[int], chunks: Sequence[int], capacity: int
    ) -> Room:
        # All begin at multiples of 16 bytes: kernels are compiled anew for what does not.
        capacity, first = -(-capacity // 16) * 16, -(-self.num_sections // 4) * 4
        room = Room(level, kind, tuple(sizes), tuple(chunks), capacity, first, self.num_words)
        self.rooms.append(room)
        self.num_sections = first + room.num_sections
        self.num_words += room.num_sections * capacity
        return room

    @cached_property
    def _lines(self) -> list[Longs]:
        """Of all rooms, once all are there."""
        return [np.concatenate(part) for part in zip(*map(_lines, self.rooms), strict=True)]

    def filled(self, begins: npt.NDArray[np.int32], wanted: Sequence[bool]) -> Filled:
        """The sections of the wanted chunks, given where in its room each begins: first by chunk,
        then as a stream orders them."""
        number, chunk, code, room_at, capacity = self._lines
        kept = np.flatnonzero(np.asarray(wanted)[chunk])
        kept = kept[np.lexsort((code[kept], chunk[kept]))]
        own = begins[number[kept]].astype(np.int64)
        lengths = capacity[kept] - own
        places = np.stack([room_at[kept] + own, lengths, np.cumsum(lengths) - lengths])
        return Filled(chunk[kept], code[kept], places)


def _lines(room: Room) -> tuple[Longs, Longs, Longs, Longs, Longs]:
    """Of each section that a room has: its number, chunk and code, where its words may lie, and how
    many."""
    groups, count = len(room.sizes), room.num_sections
    codes = np.array([section_code(room.level, g, room.kind) for g in range(groups)], np.int64)
    own = np.flatnonzero(np.tile(np.array(room.sizes) > 0, len(room.chunks)))
    chunks = np.repeat(np.array(room.chunks, np.int64), groups)[own]
    starts, capacity = room.first_word + room.capacity * own, np.full(count, room.capacity)[own]
    return room.first_section + own, chunks, np.tile(codes, len(room.chunks))[own], starts, capacity


class CodedLevels(NamedTuple):
    """A chunk's sections, in order, and the bytes of its levels."""

    lines: list[Line]
    levels: list[memoryview]


@dataclass(frozen=True)
class Filled:
    """Sections in the order in which they are copied: each one's chunk and code, and `places`
    [3, section]: where it begins, how many words it has, where these go."""

    chunk: Longs
    code: Longs
    places: Longs

    @property
    def num_words(self) -> int:
        return int(self.places[1].sum())

    def levels(self, data: memoryview, num_chunks: int, num_levels: int) -> list[CodedLevels]:
        """Each chunk's, given all words that were copied, as bytes."""
        _, lengths, firsts = (2 * row for row in self.places)
        code = self.code
        lines = np.stack([code >> 24, code & 255, code >> 8 & 0xFFFF, lengths], axis=1)
        # Where in the list each level of each chunk ends, and so where its bytes do.
        every = np.arange(num_chunks)[:, None] << 32 | np.arange(1, num_levels + 1) << 24
        ends = np.searchsorted(self.chunk << 32 | code, every)
        byte_ends = np.append(firsts, len(data))[ends].tolist()
        found, line, at = [], 0, 0
        for own, last in zip(byte_ends, ends[:, -1].tolist(), strict=True):
            levels = [data[a:b] for a, b in pairwise([at, *own])]
            found.append(CodedLevels([tuple(one) for one in lines[line:last].tolist()], levels))
            line, at = last, own[-1]
        return found
