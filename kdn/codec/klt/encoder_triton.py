"""Encoding klt streams on a GPU: all chunks of a context at once, straight from the cache.

Transforms are 16-bit products with float32 sums, so that an integer may differ from the CPU's where
a value lies on the edge between two; given equal integers, the bytes are equal (`push_triton.py`).
The last level codes what a reader's own rounding leaves: components are rounded to bytes here just
as `transform.py` does. Step classes and sinks are few, and coded on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from triton import next_power_of_2

from kdn.cache.keys import CHUNK_TOKENS, Chunk
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.klt import symbols
from kdn.codec.klt.columns_triton import take_columns
from kdn.codec.klt.duals import dual_rows
from kdn.codec.klt.gpu_input import token_rows
from kdn.codec.klt.gpu_tables import (
    Coding,
    SectionTables,
    Tensor,
    base_bounds,
    base_intervals,
    padded_thresholds,
    put,
)
from kdn.codec.klt.latents import Latents
from kdn.codec.klt.profile import NUM_CLASSES, Group, Profile
from kdn.codec.klt.push_triton import find_activity, leave, push
from kdn.codec.klt.streams import Streams

COLUMN_TOKENS = 16
BATCH_CHUNKS = 32
"""A batch takes about twelve times its cache's memory."""


@dataclass(frozen=True)
class Pushed:
    """Sections of one kind of all chunks and groups: `words` [chunk, group, capacity], of which
    those from `begins` [chunk, group] on are theirs; `sizes` [group] is how many rows they have."""

    level: int
    is_digits: bool
    sizes: tuple[int, ...]
    words: Tensor
    begins: Tensor


@dataclass(frozen=True)
class Encoded:
    """Chunks' step classes [tokens], their sinks' columns [sinks, columns], their sections, a
    sum that is finite if all values are, and the largest error that is left for the last level, in
    its steps."""

    classes: Tensor
    sinks: Tensor
    parts: list[Pushed]
    total: Tensor
    largest: Tensor


class GpuEncoder:
    """Encodes caches of one profile on one device. All groups are alike: see `device.py`."""

    def __init__(self, spec: ModelSpec, profile: Profile, device: torch.device) -> None:
        self.spec, self.profile, self.device = spec, profile, device
        self.coding = Coding.of(profile, device)
        self._latents = Latents(profile, device)
        self._transform = _Transform(profile, device)
        self._importance = put(profile.tensors["importance"], device)
        last, levels = profile.levels[-1], profile.num_levels
        scales = [profile.tensors["fix.scale"][g.columns] for g in profile.groups]
        self._fix_scales = put(np.stack(scales), device)
        rows = [[0, g.columns.stop - g.columns.start] for g in profile.groups]
        self._correction = SectionTables(
            levels - 1, False, tuple(n for _, n in rows), put(np.array(rows, np.int32), device),
            put(padded_thresholds(last.entering.thresholds), device),
            put(base_bounds(last.entering.cdf), device),
            put(base_intervals(last.entering.cdf), device),
        )  # fmt: skip
        digits = [level.digits for level in profile.levels]
        self._digit_intervals = [
            None if one is None else put(base_intervals(one.cdf), device) for one in digits
        ]
        self._rope = next(rope for rope in spec.ropes if rope is not None)
        self._asm = device.type == "cuda"
        self._streams = Streams(device, len(self.coding.parts) + 1)

    def encode(self, chunks: Sequence[Chunk], cache: KVCache) -> list[Encoded]:
        """Sections of every chunk, by batches; nothing is waited for."""
        found = []
        for first in range(0, len(chunks), BATCH_CHUNKS):
            batch = chunks[first : first + BATCH_CHUNKS]
            found.append(self._encode(batch, cache.slice(batch[0].start, batch[-1].end)))
        return found

    def _encode(self, chunks: Sequence[Chunk], cache: KVCache) -> Encoded:
        """Of whole chunks (the last may be shorter), which follow one another."""
        count, padded = cache.num_tokens, len(chunks) * CHUNK_TOKENS
        tokens_of = put(np.array([chunk.num_tokens for chunk in chunks], np.int32), self.device)
        rows = np.concatenate([token_rows(chunk, self.spec.vocab_size) for chunk in chunks])
        columns = self._columns(cache, padded)
        sinks = min(self.profile.num_sinks, chunks[0].num_tokens) if cache.start == 0 else 0
        kept = columns[:sinks].clone()
        log_importance = columns[:count] @ self._importance
        classes = torch.full((padded,), 2, dtype=torch.uint8, device=self.device)
        classes[:count] = self._classes(log_importance)
        columns[:count] -= self._transform.predict(self._latents(put(rows, self.device)))
        columns[:sinks] = 0
        parts, largest = self._sections(columns, classes, tokens_of, len(chunks))
        return Encoded(classes[:count], kept, parts, log_importance.sum(), largest)

    def _sections(
        self, residual: Tensor, classes: Tensor, tokens_of: Tensor, count: int
    ) -> tuple[list[Pushed], Tensor]:
        halvings = torch.exp2(-(classes.float() - NUM_CLASSES // 2) / 2)[:, None]
        q = self._transform.quantise(residual, halvings)
        errors, largest = self._transform.correction(q, residual, halvings, classes, count)
        levels = [_by_chunk(q, count, self.coding.num_rows)]
        for _ in range(self.profile.num_levels - 2):
            size = (levels[0].abs() + 1) // 3
            levels.insert(0, torch.where(levels[0] < 0, -size, size))
        # The last level takes longest; the others are done beside it.
        jobs = [(self._correction, (errors, errors, self._fix_scales), 0)]
        for part in self.coding.parts:
            coarse = levels[part.level - 1] if part.is_digits else levels[part.level]
            jobs.append((part, (levels[part.level], coarse, self.coding.scales), 1))
        found = []
        for index, (part, arrays, shifted) in enumerate(jobs):
            with self._streams.side(index):
                found.append(self._push(part, arrays, classes, tokens_of, shifted=shifted))
        for index in range(len(jobs)):
            self._streams.join(index)
        return found, largest

    def _push(
        self, part: SectionTables, arrays: tuple[Tensor, Tensor, Tensor], classes: Tensor,
        tokens_of: Tensor, *, shifted: int,
    ) -> Pushed:  # fmt: skip
        values, coarse, scales = arrays
        chunks, groups, rows, _ = values.shape
        blocks, grid = part.thresholds.shape[1], (groups, chunks)
        activity = torch.empty((chunks, groups, blocks, CHUNK_TOKENS), dtype=torch.uint8,
                               device=self.device)  # fmt: skip
        find_activity[grid](
            values, part.rows_of, part.thresholds, activity, rows, blocks, num_warps=4
        )
        # A word a symbol at most, and one more for what is escaped: of components that is rare.
        capacity = max(part.sizes) * CHUNK_TOKENS * 2 + 64
        words = torch.empty((chunks, groups, capacity), dtype=torch.int16, device=self.device)
        begins = torch.empty((chunks, groups), dtype=torch.int32, device=self.device)
        intervals = self._digit_intervals[part.level] if part.is_digits else part.intervals
        assert intervals is not None
        push[grid](
            values, coarse, activity, classes, scales, part.rows_of, tokens_of, intervals, words,
            begins, rows, scales.shape[1], blocks, capacity, shifted, DIGITS=part.is_digits,
            STEPS=CHUNK_TOKENS // 32, TABLES=intervals.shape[1], ASM=self._asm, num_warps=1,
        )  # fmt: skip
        return Pushed(part.level, part.is_digits, part.sizes, words, begins)

    def _classes(self, log_importance: Tensor) -> Tensor:
        middle = NUM_CLASSES // 2
        value = log_importance + float(self.profile.meta["importance_bias"])
        halvings = torch.round(value / np.log(2.0)).clamp(-middle, middle)
        return (halvings + middle).to(torch.uint8)

    def _columns(self, cache: KVCache, padded: int) -> Tensor:
        """[tokens, columns] in float32, RoPE undone; all channels turn, in halves."""
        spec, half = self.spec, self.spec.head_dim // 2
        own = torch.tensor(self._rope.inv_freq, dtype=torch.float64, device=self.device)
        positions = torch.arange(cache.start, cache.end, dtype=torch.float64, device=self.device)
        angles, scale = positions[:, None] * own, 1.0 / self._rope.amplitude
        turn = (angles.cos() * scale).float(), (angles.sin() * scale).float()
        width, pairs = spec.values_per_token, spec.num_kv_heads * half
        out = torch.empty((padded, width), device=self.device)
        for index, side in enumerate((cache.keys, cache.values)):
            take_columns[(padded // COLUMN_TOKENS, spec.num_layers)](
                side, *turn, out, cache.num_tokens, width,
                spec.num_layers // len(self.profile.groups), pairs, *side.stride(),
                IS_VALUE=bool(index), HALF=half, BT=COLUMN_TOKENS, BP=next_power_of_2(pairs),
            )  # fmt: skip
        return out


class _Transform:
    """Analysis and synthesis of all groups, in 16-bit floats with float32 sums; what must be more
    precise is split into a rounded number and what the rounding left."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        t = profile.tensors
        made = [_matrices(group, profile.finest_step, device) for group in profile.groups]
        self._analysis = [analysis for analysis, _, _ in made]
        self._fine = [torch.cat([fine, fine]) for _, fine, _ in made]
        self._coarse = [coarse for _, _, coarse in made]
        self._num_fine = len(profile.groups[0].fine)
        self._row_scale = put(np.stack([g.basis_scale for g in profile.groups]), device)[:, None]
        self._scale = put(np.stack([g.scale for g in profile.groups]), device).int()[:, None]
        top = profile.levels[-2]
        self._centroids = put(np.pad(top.centroids, ((0, 0), (1, 0))), device).flatten()
        weight = put(np.stack([g.weight for g in profile.groups]), device)
        self._column_scale = (profile.finest_step / weight)[:, None]
        self._fix_step = put(t["fix.step"], device).view(len(made), 1, -1)
        rows = put(t["predict.out"], device).float() * put(t["predict.out_scale"], device)
        rows = torch.cat([put(t["predict.fine"], device).float(), rows])
        self._latent_scale = rows.abs().amax(dim=1).clamp(min=1e-30) / 1024
        upper, lower = _split(rows / self._latent_scale[:, None])
        self._latent_rows = torch.cat([upper, upper, lower])
        self._bias = put(t["predict.bias"], device)

    def predict(self, latents: Tensor) -> Tensor:
        upper, lower = _split(latents * self._latent_scale)
        found = _product(torch.cat([upper, lower, upper], 1), self._latent_rows)
        return found.add_(self._bias)

    def quantise(self, residual: Tensor, halvings: Tensor) -> Tensor:
        """Integers [group, tokens, components] in finest steps."""
        groups = len(self._analysis)
        parts = residual.half().view(len(residual), groups, -1)
        exact = torch.stack([_product(parts[:, g], own) for g, own in enumerate(self._analysis)])
        exact /= halvings
        return exact.clamp_(-symbols.MAX_BASE, symbols.MAX_BASE).round_()

    def correction(
        self, q: Tensor, residual: Tensor, halvings: Tensor, classes: Tensor, num_chunks: int
    ) -> tuple[Tensor, Tensor]:
        """What is left for the last level, in whole steps [chunk, group, column, token], and the
        largest of it."""
        size = q.abs()
        cell = self._scale + 2 * (classes.int()[:, None] - NUM_CLASSES // 2)
        cell = cell.clamp_(0, symbols.NUM_SCALES - 1).mul_(4).add_(size.clamp(max=3).int())
        amounts = torch.copysign(size.add_(self._centroids[cell]), q)
        upper, lower = _split(amounts[..., : self._num_fine] * halvings)
        rest = amounts[..., self._num_fine :] * self._row_scale
        most = rest.abs().amax(dim=2, keepdim=True).clamp_(min=1e-30)
        codes = rest.mul_(127 / most).round_().half()
        large, groups, columns = torch.cat([upper, lower], 2), len(q), self._fix_step.shape[2]
        shape = (num_chunks, groups, columns, CHUNK_TOKENS)
        out = torch.empty(shape, dtype=torch.int16, device=q.device)
        grid = (len(residual) // 64, -(-columns // 64))
        largest = torch.empty((groups, grid[0] * grid[1]), device=q.device)
        for g, (fine, coarse) in enumerate(zip(self._fine, self._coarse, strict=True)):
            leave[grid](
                residual, _product(codes[g], coarse), _product(large[g], fine), most[g], halvings,
                self._column_scale[g], self._fix_step[g], out, largest[g], residual.shape[1],
                columns, g, groups, BT=64, BC=64,
            )  # fmt: skip
        return out, largest.max()


def _matrices(group: Group, step: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """From residuals to components in finest steps, and the rows of the way back."""
    analysis = dual_rows(group, device) * put(group.weight, device) / step
    fine, coarse = put(group.fine, device), put(group.basis, device)
    return analysis.half().T.contiguous(), fine.half(), coarse.half()


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    upper = values.half()
    return upper, (values - upper).half()


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _by_chunk(values: Tensor, count: int, num_rows: int) -> Tensor:
    """[group, tokens, rows] as integers [chunk, group, rows, token]."""
    groups, _, rows = values.shape
    out = torch.zeros((count, groups, num_rows, CHUNK_TOKENS), dtype=torch.int16,
                      device=values.device)  # fmt: skip
    out[:, :, :rows] = values.view(groups, count, CHUNK_TOKENS, rows).permute(1, 0, 3, 2)
    return out
