"""Encoding klt streams on a GPU: any chunks at once, straight from their caches.

First all columns, since how finely a token is coded follows from all of them; then group by group
what prediction leaves, its components, their integers, and what these leave for the last level;
then all sections side by side. Transforms are 16-bit products with float32 sums, so that an integer
may differ from the CPU's where a value lies on the edge between two; given equal integers, the
bytes are equal (`push_triton.py`). Components are rounded to bytes just as readers do.

Nothing is waited for here. What one chunk holds has no effect on another: a value that cannot be
coded is reported for its chunk alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.klt import symbols
from kdn.codec.klt.columns_triton import subtract_prediction, take_columns
from kdn.codec.klt.encoder_tables import EncoderTables, product
from kdn.codec.klt.gpu_input import Ids, token_rows
from kdn.codec.klt.gpu_means import MeanTables
from kdn.codec.klt.gpu_output import Filled, Room, Sheet, send
from kdn.codec.klt.gpu_tables import SectionTables, Tensor
from kdn.codec.klt.kinds import KIND_MEANS, KIND_SINKS, KIND_TOKENS
from kdn.codec.klt.latents import Latents
from kdn.codec.klt.profile import MEAN_LANES, NUM_CLASSES, Profile
from kdn.codec.klt.push_triton import find_activity, gather, push, push_classes
from kdn.codec.klt.quantise_triton import leave, quantise
from kdn.codec.klt.streams import CudaStreams

COLUMN_TOKENS, COLUMN_PAIRS = 16, 128
LEFT_TOKENS, LEFT_COLUMNS = 64, 64
FEW_LANES = 32
"""Room of a row of first tokens, or of means: the least that the kernel takes."""

Item = tuple[Chunk, KVCache]


@dataclass(frozen=True)
class Batch:
    """Chunks on their way, padded to whole ones: of each how many tokens it has, how many of them
    are sinks, and which layer lacks how many of its first tokens (sinks counted) [chunk, layer];
    `positions` [tokens], and `ids` [tokens, 3] of each token and of those before it."""

    items: Sequence[Item]
    num_sinks: tuple[int, ...]
    tokens_of: Tensor
    cleared: Tensor
    positions: Tensor
    ids: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.items) * CHUNK_TOKENS

    @property
    def with_sinks(self) -> list[int]:
        return [index for index, count in enumerate(self.num_sinks) if count]


@dataclass(frozen=True)
class Encoded:
    """Sections of a batch on the device: `words` of all rooms and where in its room each section
    `begins`; `totals` [chunk] are finite where all values are, `largest` [chunk] tells how far
    integers go."""

    sheet: Sheet
    words: Tensor
    begins: Tensor
    totals: Tensor
    largest: Tensor

    def gathered(self, filled: Filled) -> Tensor:
        """These sections one after the other."""
        out = torch.empty(max(filled.num_words, 1), dtype=torch.int16, device=self.words.device)
        count = filled.places.shape[1]
        if count:
            places = send(filled.places, self.words.device)
            gather[(count, 8)](self.words, places, out, count, BLOCK=1024)
        return out


class Pushing(NamedTuple):
    """One kind of sections to be coded: its tables and room, integers, the level before, scale
    classes, and whether the tokens' step classes shift these."""

    part: SectionTables
    room: Room
    values: Tensor
    coarse: Tensor
    scales: Tensor
    shifted: int


class GpuEncoder:
    """Encodes caches of one profile on one device."""

    def __init__(self, spec: ModelSpec, profile: Profile, device: torch.device) -> None:
        self.spec, self.profile, self.device = spec, profile, device
        self.tables = EncoderTables(spec, profile, device)
        self.coding = self.tables.coding
        self._latents = Latents(profile, device)
        self._asm = device.type == "cuda"
        self._streams = CudaStreams(device, len(self.coding.parts) + 2)
        self._widths = [g.columns.stop - g.columns.start for g in profile.groups]

    def encode(self, batch: Batch) -> Encoded:
        """All sections of chunks that are the model's."""
        items = batch.items
        sheet, rooms, means_rooms, sinks_room, classes_room = self._rooms(batch)
        columns, words = self._memory(batch.num_tokens, sheet.num_words)
        begins = torch.zeros(sheet.num_sections, dtype=torch.int32, device=self.device)
        self._take_columns(batch, columns)
        log_importance = columns @ self.tables.importance
        classes = self._classes(log_importance)
        sinks, sinks_largest = self._sinks(batch, columns)
        planes, errors, largest, sums = self._integers(batch, columns, classes)
        jobs = [self._pushing(part, room, planes, errors) for part, room in rooms]
        self._push_all(jobs, classes, batch.tokens_of, words, begins)
        for tables, room in zip(self.tables.means, means_rooms, strict=True):
            self._push_means(tables, self._means(tables, batch, sums), room, words, begins)
        if sinks is not None:
            self._push_sinks(batch, sinks, sinks_room, words, begins)
        self._push_classes(batch, classes, classes_room, words, begins)
        totals = log_importance.view(len(items), CHUNK_TOKENS).sum(dim=1)
        return Encoded(sheet, words, begins, totals, torch.maximum(largest, sinks_largest))

    def memory_bytes(self, num_chunks: int) -> int:
        """What encoding so many chunks takes on the device, at most, beside the caches."""
        tokens, groups = num_chunks * CHUNK_TOKENS, len(self._widths)
        columns, rows = sum(self._widths), self.coding.num_rows
        capacity = sum(_capacity(part) for part in self._parts) + max(self._widths) * FEW_LANES * 2
        capacity += sum(_few_capacity(one.part, MEAN_LANES) for one in self.tables.means)
        words = 2 * num_chunks * groups * capacity
        integers = 2 * tokens * groups * (max(self._widths) + rows * (self.profile.num_levels - 1))
        passing = tokens * (14 * max(self._widths) + 8 * rows)
        return int(max(4 * tokens * columns, words) + integers + passing + tokens * columns)

    @property
    def _parts(self) -> tuple[SectionTables, ...]:
        # The last level takes longest; the others are done beside it.
        return (self.coding.correction, *self.coding.parts)

    def batch(self, items: Sequence[Item]) -> Batch:
        """Chunks of the model's."""
        sinks = tuple(self.profile.num_sinks_of(chunk) for chunk, _ in items)
        arrays = batch_arrays(items, sinks, self.spec)
        return Batch(items, sinks, *(send(array, self.device) for array in arrays))

    def _rooms(
        self, batch: Batch
    ) -> tuple[Sheet, list[tuple[SectionTables, Room]], list[Room], Room, Room]:
        sheet, every = Sheet(), range(len(batch.items))
        rooms = [
            (part, sheet.add(part.level, part.kind, part.sizes, every, _capacity(part)))
            for part in self._parts
        ]
        means = [one.part for one in self.tables.means]
        means_rooms = [
            sheet.add(part.level, KIND_MEANS, part.sizes, every, _few_capacity(part, MEAN_LANES))
            for part in means
        ]
        part = self.tables.sinks.part
        capacity = _few_capacity(part, max(batch.num_sinks))
        sinks = sheet.add(0, KIND_SINKS, part.sizes, batch.with_sinks, capacity)
        classes = sheet.add(0, KIND_TOKENS, (1,), every, CHUNK_TOKENS + 2)
        return sheet, rooms, means_rooms, sinks, classes

    def _memory(self, num_tokens: int, num_words: int) -> tuple[Tensor, Tensor]:
        """Columns [tokens, columns], and words in the same place: they are written when columns
        have been read for the last time."""
        width = sum(self._widths)
        shared = torch.empty(max(num_tokens * width, -(-num_words // 2)), device=self.device)
        columns = shared[: num_tokens * width].view(num_tokens, width)
        return columns, shared.view(torch.int16)[:num_words]

    def _take_columns(self, batch: Batch, out: Tensor) -> None:
        """[tokens, columns] in float32, RoPE undone."""
        spec, tables = self.spec, self.tables
        turns = tables.angles(batch.positions)
        pairs = tables.pairs.first.shape[1]
        grid = (CHUNK_TOKENS // COLUMN_TOKENS, spec.num_layers, -(-pairs // COLUMN_PAIRS))
        for index, (chunk, cache) in enumerate(batch.items):
            for is_value, side in enumerate((cache.keys, cache.values)):
                take_columns[grid](
                    side, out, *tables.pair_tables, tables.begins[is_value], *turns,
                    index * CHUNK_TOKENS, chunk.num_tokens, out.shape[1], pairs,
                    tables.pairs.num_frequencies, spec.head_dim, *side.stride(),
                    IS_VALUE=bool(is_value), BT=COLUMN_TOKENS, BP=COLUMN_PAIRS,
                )  # fmt: skip

    def _classes(self, log_importance: Tensor) -> Tensor:
        middle = NUM_CLASSES // 2
        value = (log_importance + self.tables.importance_bias).nan_to_num()
        halvings = torch.round(value / np.log(2.0)).clamp(-middle, middle)
        return (halvings + middle).to(torch.uint8)

    def _sinks(self, batch: Batch, columns: Tensor) -> tuple[Tensor | None, Tensor]:
        """Integers of sinks [chunk with sinks, group, column, lane], and the largest of each
        chunk."""
        largest = torch.zeros(len(batch.items), device=self.device)
        chosen, tables, most = batch.with_sinks, self.tables.sinks, max(batch.num_sinks)
        if not chosen:
            return None, largest
        numbers = send(np.array(chosen), self.device)
        counts = send(np.array(batch.num_sinks)[chosen], self.device)
        rows = columns.view(len(batch.items), CHUNK_TOKENS, -1)[:, :most].index_select(0, numbers)
        own = torch.arange(most, device=self.device) < counts[:, None]
        steps = torch.where(own[:, :, None], (rows - tables.mean[:most]) / tables.step, 0.0)
        largest.index_copy_(0, numbers, steps.abs().amax(dim=(1, 2)))
        whole = steps.clamp_(-symbols.MAX_BASE, symbols.MAX_BASE).round_().to(torch.int16)
        shape = (len(chosen), len(self._widths), max(self._widths), FEW_LANES)
        out = torch.zeros(shape, dtype=torch.int16, device=self.device)
        for index, group in enumerate(self.profile.groups):
            own_columns = whole[:, :, group.columns].transpose(1, 2)
            out[:, index, : own_columns.shape[1], :most] = own_columns
        return out, largest

    def _integers(
        self, batch: Batch, columns: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Integers of all levels [level, chunk, group, row, token], what they leave for the last
        one [chunk, group, column, token], the largest of that in each chunk, and of each group the
        components' sums over the tokens of each chunk [chunk, component]."""
        chunks, groups, most = len(batch.items), len(self._widths), max(self._widths)
        levels = self.profile.num_levels - 1
        rows, whole = self.coding.num_rows, torch.int16
        planes = torch.empty((levels, chunks, groups, rows, CHUNK_TOKENS), dtype=whole,
                             device=self.device)  # fmt: skip
        errors = torch.empty((chunks, groups, most, CHUNK_TOKENS), dtype=whole, device=self.device)
        tiles = (groups, batch.num_tokens // LEFT_TOKENS, -(-most // LEFT_COLUMNS))
        largest = torch.zeros(tiles, device=self.device)
        latents = self.tables.prediction.prepare(self._latents(batch.ids))
        sums = [
            self._code_group(index, batch, columns, latents, classes, planes, errors, largest)
            for index in range(groups)
        ]
        per_chunk = largest.view(groups, chunks, -1).amax(dim=(0, 2))
        return planes, errors, per_chunk, sums

    def _code_group(
        self, index: int, batch: Batch, columns: Tensor, latents: Tensor, classes: Tensor,
        planes: Tensor, errors: Tensor, largest: Tensor,
    ) -> Tensor:  # fmt: skip
        """The components' sums; all else is written."""
        own, group, coding = self.tables.groups[index], self.profile.groups[index], self.coding
        tokens, width, (first, last) = batch.num_tokens, self._widths[index], group.layers
        grid = (tokens // LEFT_TOKENS, -(-width // LEFT_COLUMNS))
        halves = torch.empty((tokens, width), dtype=torch.float16, device=self.device)
        subtract_prediction[grid](
            columns, self.tables.prediction.of(latents, group.columns),
            self.tables.prediction.bias, batch.cleared, batch.tokens_of, halves, columns.shape[1],
            group.columns.start, width, self.spec.num_kv_heads * self.spec.head_dim, first,
            last - first, self.spec.num_layers, BT=LEFT_TOKENS, BC=LEFT_COLUMNS,
        )  # fmt: skip
        exact = product(halves, own.analysis)
        codes = torch.empty((tokens, own.count - own.num_fine), dtype=torch.float16,
                            device=self.device)  # fmt: skip
        large = torch.empty((tokens, 2 * own.num_fine), dtype=torch.float16, device=self.device)
        most = torch.empty(tokens, device=self.device)
        quantise[(tokens // 32,)](
            exact, classes, coding.class_factor, own.scales, coding.centroids[-1], own.row_scale,
            planes, codes, large, most, index, len(self._widths), coding.num_rows,
            planes.stride(0), own.count, own.num_fine, LEVELS=len(planes), BT=32, BR=64,
        )  # fmt: skip
        leave[grid](
            columns, product(codes, own.coarse), product(large, own.fine), most, classes,
            coding.class_factor, own.column_scale, own.fix_step, errors, largest,
            columns.shape[1], group.columns.start, width, max(self._widths), index,
            len(self._widths), largest.shape[2], BT=LEFT_TOKENS, BC=LEFT_COLUMNS,
        )  # fmt: skip
        return exact.view(len(batch.items), CHUNK_TOKENS, -1).sum(dim=1)

    def _means(self, tables: MeanTables, batch: Batch, sums: Sequence[Tensor]) -> Tensor:
        """Integers of one level's means [chunk, group, row, lane]: first tokens, and those that
        fill a chunk up, are zero in the sums."""
        chunks, sizes = len(batch.items), tables.part.sizes
        shape = (chunks, len(sizes), max(sizes), FEW_LANES)
        out = torch.zeros(shape, dtype=torch.int16, device=self.device)
        steps = tables.step * batch.tokens_of[:, None].sqrt()
        for index, (group_sums, size) in enumerate(zip(sums, sizes, strict=True)):
            if size:
                left = group_sums[:, self.profile.levels[tables.part.level].num_components[index] :]
                whole = (left / steps).nan_to_num().clamp(-symbols.MAX_BASE, symbols.MAX_BASE)
                rows = pad(whole.round(), (0, size * MEAN_LANES - left.shape[1]))
                out[:, index, :size, :MEAN_LANES] = rows.view(chunks, size, MEAN_LANES)
        return out

    def _pushing(self, part: SectionTables, room: Room, planes: Tensor, errors: Tensor) -> Pushing:
        if part.is_correction:
            return Pushing(part, room, errors, errors, self.coding.fix_scales, 0)
        before = planes[part.level - 1] if part.is_digits else planes[part.level]
        return Pushing(part, room, planes[part.level], before, self.coding.scales, 1)

    def _push_all(
        self, jobs: Sequence[Pushing], classes: Tensor, tokens_of: Tensor, words: Tensor,
        begins: Tensor,
    ) -> None:  # fmt: skip
        # Taken before the streams part: torch keeps the memory of each stream for it alone.
        kept = [self._activity(job.part, job.values) for job in jobs]
        for index, (job, activity) in enumerate(zip(jobs, kept, strict=True)):
            with self._streams.side(index):
                self._push(job, activity, classes, tokens_of, words, begins)
        for index in range(len(jobs)):
            self._streams.join(index)

    def _activity(self, part: SectionTables, values: Tensor) -> Tensor:
        """Room for activity classes [chunk, group, block, token]."""
        shape = (*values.shape[:2], part.thresholds.shape[1], values.shape[3])
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def _push(
        self, job: Pushing, activity: Tensor, classes: Tensor, tokens_of: Tensor, words: Tensor,
        begins: Tensor,
    ) -> None:  # fmt: skip
        part, room, values, coarse, scales, shifted = job
        chunks, groups, rows, width = values.shape
        if width == CHUNK_TOKENS:
            find_activity[(groups, chunks)](
                values, part.rows_of, part.thresholds, activity, rows, activity.shape[2],
                num_warps=4,
            )  # fmt: skip
        intervals = self.tables.intervals(part)
        push[(groups, chunks)](
            values, coarse, activity, classes, scales, part.rows_of, tokens_of, intervals,
            words[room.words], begins[room.sections], rows, scales.shape[1], activity.shape[2],
            room.capacity, shifted, DIGITS=part.is_digits, STEPS=width // 32,
            TABLES=intervals.shape[1], ASM=self._asm, num_warps=1,
        )  # fmt: skip

    def _push_sinks(
        self, batch: Batch, sinks: Tensor, room: Room, words: Tensor, begins: Tensor
    ) -> None:
        counts = np.array(batch.num_sinks, np.int32)[batch.with_sinks]
        tables = self.tables.sinks
        job = Pushing(tables.part, room, sinks, sinks, tables.scales, 0)
        self._push_few(job, send(counts, self.device), words, begins)

    def _push_means(
        self, tables: MeanTables, means: Tensor, room: Room, words: Tensor, begins: Tensor
    ) -> None:
        counts = torch.full((len(means),), MEAN_LANES, dtype=torch.int32, device=self.device)
        job = Pushing(tables.part, room, means, means, tables.scales, 0)
        self._push_few(job, counts, words, begins)

    def _push_few(self, job: Pushing, counts: Tensor, words: Tensor, begins: Tensor) -> None:
        """Rows of a few lanes, `counts` of each chunk. Their activity is always none, and step
        classes are not theirs: any will do."""
        activity = self._activity(job.part, job.values).zero_()
        classes = torch.zeros((len(job.values), CHUNK_TOKENS), dtype=torch.uint8,
                              device=self.device)  # fmt: skip
        self._push(job, activity, classes, counts, words, begins)

    def _push_classes(
        self, batch: Batch, classes: Tensor, room: Room, words: Tensor, begins: Tensor
    ) -> None:
        push_classes[(len(batch.items),)](
            classes, batch.tokens_of, self.tables.class_intervals, words[room.words],
            begins[room.sections], room.capacity, num_warps=1,
        )  # fmt: skip


def batch_arrays(
    items: Sequence[Item], num_sinks: Sequence[int], spec: ModelSpec
) -> list[npt.NDArray[np.generic]]:
    """What a batch has on the device, in its order."""
    cleared = np.zeros((len(items), spec.num_layers), np.int32)
    for index, (chunk, cache) in enumerate(items):
        cleared[index] = np.maximum(np.array(cache.valid_from) - chunk.start, num_sinks[index])
    starts = np.array([chunk.start for chunk, _ in items])
    ids = [_padded(token_rows(chunk, spec.vocab_size), spec.vocab_size) for chunk, _ in items]
    return [
        np.array([chunk.num_tokens for chunk, _ in items], np.int32),
        cleared,
        (starts[:, None] + np.arange(CHUNK_TOKENS)).ravel(),
        np.concatenate(ids),
    ]


def _capacity(part: SectionTables) -> int:
    """Words: the states, one a symbol at most, and one more for what is escaped."""
    return max(part.sizes) * CHUNK_TOKENS * (1 if part.is_digits else 2) + 64


def _few_capacity(part: SectionTables, lanes: int) -> int:
    return max(part.sizes) * lanes * 2 + 2 * FEW_LANES


def _padded(rows: Ids, filling: int) -> Ids:
    out = np.full((CHUNK_TOKENS, rows.shape[1]), filling, np.int64)
    out[: len(rows)] = rows
    return out
