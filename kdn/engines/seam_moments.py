"""From joins that were read both ways to the linear map between them, in closed form.

Sums over tokens are all that is kept of the readings: [columns, columns] of joined values with
themselves and with their difference from the full reading. From these follow ridge regressions of
any strength, cut to the rank that predicts best in an error metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kdn.blend.seams import Block
from kdn.codec.threads import parallel_map

Layers = tuple[int, int]

CHECKED_EVERY = 4
"""Joins, one of which is left out for choosing ridges."""


@dataclass
class Moments:
    """Sums over the tokens of moved pieces, of one block of layers. Values are taken relative to
    `origin`, about their mean, so that float32 is enough for the sums."""

    layers: Layers
    origin: torch.Tensor
    count: int
    inputs: torch.Tensor
    """[columns]"""
    outputs: torch.Tensor
    gram: torch.Tensor
    """[columns, columns]: inputs with inputs."""
    cross: torch.Tensor
    """Inputs with outputs."""
    squares: torch.Tensor
    """[columns] of outputs."""

    @classmethod
    def zeros(cls, layers: Layers, origin: torch.Tensor) -> Moments:
        width = len(origin)
        flat, square = origin.new_zeros(width), origin.new_zeros(width, width)
        return cls(
            layers, origin, 0, flat.clone(), flat.clone(), square.clone(), square, flat.clone()
        )

    def add(self, joined: torch.Tensor, full: torch.Tensor) -> None:
        """Both [tokens, columns]."""
        inputs, outputs = joined - self.origin, full - joined
        self.count += len(inputs)
        self.inputs += inputs.sum(0)
        self.outputs += outputs.sum(0)
        self.gram.addmm_(inputs.T, inputs)
        self.cross.addmm_(inputs.T, outputs)
        self.squares += outputs.square().sum(0)

    def without(self, part: Moments) -> Moments:
        """The sums over all tokens but those of a part of them, with the same origin."""
        return Moments(
            self.layers, self.origin, self.count - part.count, self.inputs - part.inputs,
            self.outputs - part.outputs, self.gram - part.gram, self.cross - part.cross,
            self.squares - part.squares,
        )  # fmt: skip

    def merge(self, other: Moments) -> None:
        """Also over other tokens, with the same origin."""
        self.count += other.count
        for own, more in zip(self._sums, other._sums, strict=True):
            own += more

    @property
    def _sums(self) -> tuple[torch.Tensor, ...]:
        return self.inputs, self.outputs, self.gram, self.cross, self.squares

    def centred(self) -> Centred:
        mean_in, mean_out = self.inputs / self.count, self.outputs / self.count
        return Centred(
            self.layers,
            self.origin + mean_in,
            mean_out,
            self.gram / self.count - torch.outer(mean_in, mean_in),
            self.cross / self.count - torch.outer(mean_in, mean_out),
        )


class JoinSums:
    """Over joins, by block of layers: sums over all of them, and over every fourth, on which ridges
    are chosen."""

    def __init__(self, blocks: Sequence[Layers]) -> None:
        self.blocks, self.num_joins = blocks, 0
        self._every: list[Moments] = []
        self._checked: list[Moments] = []

    def empty(self) -> JoinSums:
        """With the same origins, to be merged later."""
        found = JoinSums(self.blocks)
        found._every, found._checked = (
            [Moments.zeros(one.layers, one.origin) for one in self._every] for _ in range(2)
        )
        return found

    def add(
        self, joined: torch.Tensor, full: torch.Tensor, start: int, again: bool = False
    ) -> None:
        """A join's columns [layers, tokens, 2, values], as joined and as read in full; its tokens
        from `start` on. `again`: the last one's pieces in another order, which belong together:
        no ridge is chosen on pieces that were fitted on in some order."""
        self.num_joins += not again
        is_checked = self.num_joins % CHECKED_EVERY == 0
        for index, layers in enumerate(self.blocks):
            own = [block_columns(one, layers, start) for one in (joined, full)]
            if len(self._every) == index:
                for sums in (self._every, self._checked):
                    sums.append(Moments.zeros(layers, own[0].mean(0)))
            self._every[index].add(*own)
            if is_checked:
                self._checked[index].add(*own)

    def merge(self, other: JoinSums) -> None:
        self.num_joins += other.num_joins
        pairs = zip(self._every + self._checked, other._every + other._checked, strict=True)
        for own, more in pairs:
            own.merge(more)

    def solved(self, ridges: Sequence[float], rank: int) -> list[Block]:
        """The map of each block, with the ridge that predicts best on the joins left out for it.

        On a CPU each block has one core. The matrices are small: threads that share them wait for
        each other, and where other programs compete for the cores, 100 times as long as they work.
        """

        def solve(pair: tuple[Moments, Moments]) -> Block:
            sums, checked = pair
            every = sums.centred()
            weight = 1 / every.deviation  # all columns count alike, whatever their size
            ridge = _best_ridge(sums, checked, weight, ridges, rank)
            return fit_block(every, weight, ridge, rank)

        pairs = list(zip(self._every, self._checked, strict=True))
        if self._every[0].gram.device.type == "cpu":
            return parallel_map(solve, pairs)
        return [solve(pair) for pair in pairs]


def _best_ridge(
    sums: Moments, checked: Moments, weight: torch.Tensor, ridges: Sequence[float], rank: int
) -> float:
    if not checked.count:
        return ridges[-1]
    rest = sums.without(checked).centred()
    return min(
        ridges, key=lambda one: left_over(fit_block(rest, weight, one, rank), checked, weight)
    )


@dataclass(frozen=True)
class Centred:
    """Means, and covariances of inputs with inputs and with outputs."""

    layers: Layers
    mean_in: torch.Tensor
    mean_out: torch.Tensor
    gram: torch.Tensor
    cross: torch.Tensor

    @property
    def deviation(self) -> torch.Tensor:
        """Of each input column. One that never changes has nothing but rounding to go by: it counts
        as one that changes a little."""
        variance = self.gram.diagonal()
        return variance.clamp(min=max(1e-12, 1e-6 * float(variance.mean()))).sqrt()


def fit_block(sums: Centred, weight: torch.Tensor, ridge: float, rank: int) -> Block:
    """The map of that rank that predicts best where each output column counts by its `weight`.

    `ridge` is relative to each column's own variance: columns of all sizes are shrunk alike.
    """
    scale = sums.deviation
    gram = sums.gram / scale[:, None] / scale
    gram.diagonal().add_(ridge)
    root = torch.linalg.cholesky(gram)
    whitened = torch.linalg.solve_triangular(root, sums.cross / scale[:, None], upper=False)
    left = _leading(whitened * weight, rank)
    down = torch.linalg.solve_triangular(root.T, left, upper=True) / scale[:, None]
    up = left.T @ whitened
    balance = (up.norm(dim=1) / down.norm(dim=0).clamp(min=1e-30)).clamp(min=1e-12).sqrt()
    down, up = down * balance, up / balance[:, None]
    return Block(sums.layers, down, up, sums.mean_out - sums.mean_in @ down @ up)


def _leading(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Its first left singular vectors [rows, rank]."""
    rank = min(rank, *matrix.shape)
    if 2 * rank >= min(matrix.shape):
        vectors: torch.Tensor = torch.linalg.eigh(matrix @ matrix.T)[1]
        return vectors[:, -rank:].flip(1)
    # subspace iteration: a rank far below the size needs no whole decomposition
    generator = torch.Generator(matrix.device).manual_seed(0)
    start = torch.randn(matrix.shape[1], rank + 32, generator=generator, device=matrix.device)
    basis: torch.Tensor = torch.linalg.qr(matrix @ start)[0]
    for _ in range(4):
        basis = torch.linalg.qr(matrix @ (matrix.T @ basis))[0]
    inside = (basis.T @ matrix).double()  # by its Gram matrix: a GPU takes long for an SVD
    left: torch.Tensor = torch.linalg.eigh(inside @ inside.T)[1].to(basis)
    return basis @ left.flip(1)[:, :rank]


def left_over(block: Block, held_out: Moments, weight: torch.Tensor) -> float:
    """Weighted squared error of the repaired values, relative to that of the joined ones."""
    count = held_out.count
    bias = block.bias + held_out.origin @ block.down @ block.up
    # sum of |d - (x M + b)|^2 from the sums alone, column by column
    low_gram = block.down.T @ held_out.gram @ block.down
    predicted = ((low_gram @ block.up) * block.up).sum(0)
    with_cross = ((block.down.T @ held_out.cross) * block.up).sum(0)
    mean_map = (held_out.inputs @ block.down) @ block.up
    error = held_out.squares + predicted - 2 * with_cross + count * bias.square()
    error += 2 * bias * (mean_map - held_out.outputs)
    weighted = weight.square()
    return float((error * weighted).sum() / (held_out.squares * weighted).sum())


def block_columns(columns: torch.Tensor, layers: Layers, start: int) -> torch.Tensor:
    """Of [layers, tokens, 2, values], the tokens from `start` on as a block orders them."""
    own = columns[layers[0] : layers[1], start:].float()
    return own.permute(1, 2, 0, 3).reshape(own.shape[1], -1)


def spans(num_layers: int, size: int) -> Sequence[Layers]:
    """Layers in blocks of `size`."""
    return [(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
