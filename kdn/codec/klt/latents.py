"""`transform.Predictor` on a device, for many chunks at once: the same integers. Plain torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kdn.codec.klt.gpu_memory import Carving
from kdn.codec.klt.gpu_tables import put
from kdn.codec.klt.profile import CONTEXT_TOKENS, Profile

Products = Callable[[torch.Tensor], torch.Tensor]


class Latents:
    """`transform.Predictor` on the device: the same integers."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        t = profile.tensors
        codes, mix = t["embed.codes"], t["predict.mix"]
        self.num_fine = len(t["predict.fine"])
        embed, rank = codes.shape[1], mix.shape[1]
        # Padded to what integer products on GPUs ask for; row `len(codes)` is no token at all.
        wide = -(-embed // 16) * 16
        table = np.zeros((len(codes) + 1, wide), np.int8)
        table[:-1, :embed] = codes
        weights = np.zeros((CONTEXT_TOKENS, wide, -(-rank // 16) * 16), np.int8)
        weights[:, :embed, :rank] = mix.reshape(CONTEXT_TOKENS, embed, rank)
        self._codes = put(table, device)
        # Transposed storage: the layout that integer products on GPUs take.
        self._mix = put(np.ascontiguousarray(weights.reshape(-1, weights.shape[2]).T), device).T
        self.scale = put(t["predict.mix_scale"], device)
        self.rank = rank

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Of tokens whose ids, and those of the tokens before, are given [tokens, 3]: their latent
        variables [tokens, rank], rounded as the encoder rounds them."""
        features = self._codes[ids].flatten(1)
        latent = torch._int_mm(features, self._mix)[:, : self.rank] * self.scale
        rest = latent[:, self.num_fine :]
        if rest.shape[1]:
            unit = rest.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30) / 127
            rest.copy_((rest / unit).round_() * unit)
        return latent

    def products_in(self, num_tokens: int, memory: Carving) -> Products:
        """The first step of it, in memory of the caller's: of at most so many tokens at a time,
        their products [tokens, at least rank], not scaled."""
        width = self._mix.shape[0]
        features = memory.take((num_tokens, width), torch.int8)
        found = memory.take((num_tokens, self._mix.shape[1]), torch.int32)

        def products(ids: torch.Tensor) -> torch.Tensor:
            own, out = features[: len(ids)], found[: len(ids)]
            torch.index_select(self._codes, 0, ids.view(-1), out=own.view(-1, self._codes.shape[1]))
            return torch._int_mm(own, self._mix, out=out)

        return products

    def products_bytes(self, num_tokens: int) -> int:
        """What that takes."""
        return num_tokens * (self._mix.shape[0] + 4 * self._mix.shape[1])
