"""The profile of a base model, and the part of it that a fine-tuned model keeps.

A fine-tune has the base's shape and nearly its hidden states, so the base's predictor, metric,
basis and importance still fit it. What a profile knows of token ids must fit too. The profile holds
the base's token embeddings under a linear map and rounded; fitting that map anew to the fine-tune's
own embeddings tells whether its tokens are the base's, and gives codes to tokens it added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kdn.cache.spec import ModelSpec
from kdn.codec.klt.profile import Profile
from kdn.codec.profiles import SHIPPED
from kdn.errors import FormatError, MismatchError, UnsupportedError

SHAPE = ("num_layers", "num_kv_heads", "head_dim")
REMEASURED = ("level", "token.", "mean.", "sink.", "fix.")
"""Tensors whose names begin so are measured anew; so are scale classes, which keep their place."""
MIN_EXPLAINED = 0.5
"""A vocabulary is the base's if a linear map explains this part of the base's codes: of its own
embeddings it explains all but rounding, of another model's nothing."""
_HELD_OUT = 4
"""Every fourth token tests the map that the others were fitted to."""
_FITTED_ROWS = 4
"""So many tokens per dimension are enough to fit it."""


@dataclass(frozen=True)
class Point:
    """What a level costs and does."""

    bits: float
    kld: float


def shipped_profile(spec: ModelSpec, folder: Path = SHIPPED) -> Profile:
    """The one profile that was shipped for a model of this shape."""
    fitting, names = [], []
    for path in sorted(folder.glob("*.safetensors")):
        profile = load_base(path)
        names.append("x".join(str(profile.meta[name]) for name in SHAPE))
        if all(profile.meta[name] == getattr(spec, name) for name in SHAPE):
            fitting.append(profile)
    if len(fitting) != 1:
        raise UnsupportedError(
            f"expected one shipped profile for {spec.num_layers} layers of {spec.num_kv_heads} KV "
            f"heads of {spec.head_dim}, found {len(fitting)} (shipped: {', '.join(names)}): name a "
            "profile's file, or the base model"
        )
    return fitting[0]


def load_base(path: Path) -> Profile:
    """A profile to renew; errors name the file."""
    try:
        return Profile.load(path)
    except FormatError as error:
        text = str(error)
        raise FormatError(text if str(path) in text else f"{path}: {text}") from error


def expected_of(profile: Profile) -> list[Point]:
    """What the profile says of each level on its own model."""
    try:
        points = [
            Point(float(told["bits"]), float(told["kld"])) for told in profile.meta["expected"]
        ]
    except (KeyError, TypeError, ValueError):
        points = []
    if not points or not all(0 < p.bits < 1e3 and 0 < p.kld < 1e3 for p in points):
        raise UnsupportedError(
            "the profile does not say what its levels reach on its own model, so nothing can be "
            "held against it: calibrate the base model anew"
        )
    return points


def check_shape(profile: Profile, spec: ModelSpec) -> None:
    """Codes are made per layer and head: no fine-tune changes these."""
    for name in SHAPE:
        expected, found = getattr(spec, name), profile.meta[name]
        if expected != found:
            raise MismatchError(
                f"the profile is of a model of another shape: {name} expected {expected}, found "
                f"{found}; give the profile of the model that this one was tuned from"
            )


def kept_parts(
    profile: Profile, spec: ModelSpec, embeddings: torch.Tensor
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The transform as `meta` and `tensors` of a profile for the fine-tuned model, whose normalised
    token embeddings are given."""
    check_shape(profile, spec)
    tensors = {k: t for k, t in profile.tensors.items() if not k.startswith(REMEASURED)}
    tensors["embed.codes"] = token_codes(profile.tensors["embed.codes"], embeddings)
    meta = {k: v for k, v in profile.meta.items() if k not in ("expected", "num_components")}
    meta |= {"model": spec.fingerprint.hex(), "vocab_size": len(tensors["embed.codes"])}
    return meta, tensors


def token_codes(codes: npt.NDArray[np.int8], embeddings: torch.Tensor) -> npt.NDArray[np.int8]:
    """The base's codes, for as many tokens as the model has [vocabulary, width]: those of added
    tokens are their embeddings under the base's map. A base with hardly more tokens than dimensions
    does not determine that map; its added tokens get zeros, like tokens before a beginning."""
    shared, width = min(len(codes), len(embeddings)), embeddings.shape[1]
    added = np.zeros((len(embeddings) - shared, codes.shape[1]), np.int8)
    if shared * (_HELD_OUT - 1) // _HELD_OUT > width:
        rows = slice(0, shared, max(1, shared // (_FITTED_ROWS * width)))
        fitted = _fit_map(embeddings[rows].cpu().double(), torch.from_numpy(codes[rows]).double())
        coded = embeddings[shared:].cpu().double() @ fitted
        added = coded.round().clamp(-127, 127).to(torch.int8).numpy()
    return np.concatenate([codes[:shared], added])


def _fit_map(embeddings: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """codes ~ embeddings @ map; MismatchError if they have nothing to do with each other."""
    is_test = torch.arange(len(codes)) % _HELD_OUT == 0
    given = embeddings[~is_test]
    gram = given.T @ given
    gram.diagonal().add_(1e-6 * gram.diagonal().mean())
    fitted: torch.Tensor = torch.linalg.solve(gram, given.T @ codes[~is_test])
    missed = (embeddings[is_test] @ fitted - codes[is_test]).square().sum()
    explained = 1 - float(missed / codes[is_test].square().sum().clamp(min=1e-9))
    if not explained >= MIN_EXPLAINED:
        raise MismatchError(
            "the profile is of a model with another vocabulary: its token embeddings are not those "
            f"of this model (explained: {max(explained, 0):.0%}, expected at least "
            f"{MIN_EXPLAINED:.0%}); give the profile of the model that this one was tuned from"
        )
    return fitted


def bits_at_equal_kld(found: Sequence[Point], base: Sequence[Point]) -> float | None:
    """How many times the base's bits are needed for the same divergence, on average over the
    divergences that both reach; None if there are none. The last level, which codes values rather
    than components, says little of a transform and counts only where there are but two."""
    curves = [_by_kld(points[: max(2, len(points) - 1)]) for points in (found, base)]
    low, high = max(k[0] for k, _ in curves), min(k[-1] for k, _ in curves)
    if low > high:
        return None
    at = np.linspace(low, high, 9)
    own, others = (np.interp(at, klds, bits) for klds, bits in curves)
    return float(np.exp(np.mean(own - others)))


def _by_kld(points: Sequence[Point]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Logarithms of divergences, ascending, and of bits."""
    ordered = sorted(points, key=lambda p: p.kld)
    return np.log([p.kld for p in ordered]), np.log([p.bits for p in ordered])


def points_of(expected: Sequence[Mapping[str, float]]) -> list[Point]:
    return [Point(told["bits"], told["kld"]) for told in expected]
