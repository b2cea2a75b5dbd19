"""What becomes of a family: learned, handed over, gone on from; or refused, and why.

A trial is as a user's first day: the model reads a context chunk by chunk, the chunks are coded and
decoded, another context goes on from them. What comes out must be what the model says when it reads
everything at once, without any cache.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec
from kdn.cache.states import State
from kdn.cache.tensors import KVCache
from kdn.codec.base import Codec
from kdn.codec.exact import ExactCodec
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec
from kdn.codec.states import StateCodec
from kdn.engines.checkpoint import spec_of_checkpoint
from kdn.engines.grouped import use_grouped_attention
from kdn.engines.growing import Room
from kdn.engines.latents import has_latents
from kdn.engines.reading import forward, last_tokens, new_cache
from kdn.engines.states import state_of
from kdn.engines.transformers import spec_of, to_dynamic_cache
from kdn.errors import UnsupportedError
from tests.codec.klt_profile import make_profile
from tests.engines.family_models import build

CONTEXT = 330
"""A chunk and a tail, several windows long."""
QUESTION, ANSWER = 7, 9
SHIFT = 37
"""Positions that a chunk is moved by."""
TOLERANCE = 1e-4
"""Relative, of logits: float32 sums in another order."""
# Half a step of the last level, which a token's class doubles at most (tests/codec/test_klt.py);
# turning a pair may put the errors of both into one.
KLT_ERROR = 0.0101 * 2**0.5


@dataclass(frozen=True)
class Row:
    """Of the table in docs/models.md."""

    family: str
    exact: str
    klt: str
    remarks: str

    @property
    def works(self) -> bool:
        return self.exact == YES


YES, NO, UNKNOWN = "yes", "refused", "not built"


class WrongCacheError(AssertionError):
    """A model goes on from a cache otherwise than from what it read."""


def trial(family: str, **settings: Any) -> Row:
    """WrongCacheError, or whatever else goes wrong after a model was accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # families warn of what is theirs
        return _tried(family, settings)


def _tried(family: str, settings: dict[str, Any]) -> Row:
    try:
        model = build(family, **settings)
    except Exception as error:
        return Row(family, UNKNOWN, UNKNOWN, f"no tiny model can be built here: {_said(error)}")
    try:
        spec = spec_of(model)
    except UnsupportedError as error:
        return Row(family, NO, NO, _said(error))
    learned = _Learned(model, spec)
    learned.check_exact()
    learned.check_grouped()
    learned.check_moved()
    learned.check_klt()
    check_files(model, spec)
    said = [described(spec)]
    if has_latents(model.config.get_text_config(decoder=True)):
        said.insert(0, "latents (MLA)")
    return Row(family, YES, YES, ", ".join(filter(None, said)))


def check_files(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Engines that keep weights in a form of their own find the same spec in a model's files, or
    refuse it. Its name may be another one: some weights are stored otherwise than they are used."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, KDN_CACHE=f"{folder}/cache"):
        model.save_pretrained(folder)
        try:
            found = spec_of_checkpoint(Path(folder))
        except UnsupportedError:
            return
    if replace(found, fingerprint=spec.fingerprint) != spec:
        raise WrongCacheError("the spec of its files is another one")


def described(spec: ModelSpec) -> str:
    """What is particular about a cache."""
    said = []
    if spec.has_states:
        said.append("recurrent states")
    turned = [rope for rope in spec.ropes if rope is not None]
    if not turned:
        said.append("no RoPE")
    elif len(turned) < spec.num_layers:
        said.append("layers without RoPE")
    if any(rope.rotary_dim < spec.head_dim for rope in turned):
        said.append("partial RoPE")
    if len(set(turned)) > 1:
        said.append("RoPE differs by layer")
    if spec.max_tokens is not None:
        said.append("texts up to a length")
    windows = [window for window in spec.windows if window is not None]
    if windows:
        said.append("windows" if len(windows) == spec.num_layers else "windows in some layers")
    return ", ".join(said)


class _Learned:
    """A context that a model has read, in chunks."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        self.model, self.spec = model, spec
        generator = np.random.default_rng(2)
        self.tokens = generator.integers(3, min(spec.vocab_size, 100), CONTEXT + QUESTION)
        self.own = new_cache(model)
        self.parts: list[tuple[Chunk, KVCache]] = []
        for chunk in self._chunks(b""):
            forward(model, chunk.tokens, self.own)
            self.parts.append((chunk, last_tokens(self.own, chunk.start, chunk.end)))
        self.state = self._stored_state(chunk) if spec.has_states else None

    def check_exact(self) -> None:
        """Bit for bit as from the model's own cache, and token for token as without any."""
        handed = self._handed_over(self._decoded(ExactCodec(self.spec)))
        tokens, logits = self._answer(handed)
        own_tokens, own_logits = self._answer(self.own)
        if tokens != own_tokens or not torch.equal(logits, own_logits):
            raise WrongCacheError("the model goes on otherwise than from its own cache")
        self._check_answer(tokens, logits)

    def check_grouped(self) -> None:
        """The same with the attention that kdn has for models on a CPU."""
        before = self.model.config._attn_implementation
        if use_grouped_attention(self.model):
            handed = self._handed_over(self._decoded(ExactCodec(self.spec)))
            answer = self._answer(handed)
            self.model.set_attn_implementation(before)
            self._check_answer(*answer)

    def _check_answer(self, tokens: list[int], logits: torch.Tensor) -> None:
        """Against the model without any cache."""
        everything = torch.tensor([[*self.tokens.tolist(), *tokens]])
        with torch.inference_mode():
            whole = self.model(everything, use_cache=False).logits[0, CONTEXT:]
        error = float((logits - whole).norm() / whole.norm())
        if not error < TOLERANCE:
            raise WrongCacheError(f"logits differ from those of reading everything: {error:.2g}")
        if whole[QUESTION - 1 : -1].argmax(-1).tolist() != tokens:
            raise WrongCacheError("tokens differ from those of reading everything")

    def check_moved(self) -> None:
        """The first layer's keys, decoded for other positions, are those that the model has there:
        they depend on a token and its position alone."""
        if self.spec.ropes[0] is None or self.spec.has_states:
            return  # a state is of all tokens before, and what comes after it, too
        chunk, cache = self.parts[0]
        past = new_cache(self.model)
        forward(self.model, self.tokens[:SHIFT], past)
        forward(self.model, chunk.tokens, past)
        there = last_tokens(past, SHIFT)
        codec = ExactCodec(self.spec)
        [chunk] = self._chunks(codec.profile_id)[:1]
        moved = codec.decode(Bitstream.parse(codec.encode(chunk, cache)), chunk, at=SHIFT)
        held = moved.valid_from[0] - SHIFT, there.valid_from[0] - SHIFT
        error = (moved.keys - there.keys)[0, max(held) :].abs().max()
        if not error < 1e-3 * there.keys[0].abs().max():
            raise WrongCacheError(f"keys that were moved are wrong by {error:.2g}")

    def check_klt(self) -> None:
        """Within the bound of a profile that was made for no model in particular."""
        codec = KltCodec(self.spec, make_profile(self.spec))
        amplitudes = [1.0, *(rope.amplitude for rope in self.spec.ropes if rope is not None)]
        for (_, cache), decoded in zip(self.parts, self._decoded(codec), strict=True):
            for found, wanted in ((decoded.keys, cache.keys), (decoded.values, cache.values)):
                error = (found - wanted).abs().max()
                # Far from zero, float32 itself rounds in the tenth part of a step.
                if not error <= KLT_ERROR * max(amplitudes) + 1e-5 * wanted.abs().max():
                    raise WrongCacheError(f"klt is off by {error:.2g}")
        self._answer(self._handed_over(self._decoded(codec)))

    def _chunks(self, profile_id: bytes) -> list[Chunk]:
        namespace = Namespace(self.spec.fingerprint, profile_id)
        return cut(self.tokens[:CONTEXT], namespace, whole=True)

    def _decoded(self, codec: Codec) -> list[KVCache]:
        chunks = self._chunks(codec.profile_id)
        streams = [codec.encode(c, v) for c, (_, v) in zip(chunks, self.parts, strict=True)]
        return [
            codec.decode(Bitstream.parse(stream), chunk)
            for stream, chunk in zip(streams, chunks, strict=True)
        ]

    def _handed_over(self, parts: list[KVCache]) -> Cache:
        """To a new context, in memory as kdn has it for one."""
        room = Room.of(self.spec, CONTEXT, torch.float32)
        cache = room.canonical(CONTEXT)
        for part in parts:
            cache.slice(part.start, part.end).keys.copy_(part.keys)
            cache.slice(part.start, part.end).values.copy_(part.values)
        cache = KVCache(cache.keys, cache.values, 0, _valid_from(parts))
        config = self.model.config.get_text_config(decoder=True)
        return to_dynamic_cache(cache, config, room, self.state)

    def _stored_state(self, chunk: Chunk) -> State:
        """After the last chunk, through its stream."""
        state = state_of(self.own)
        codec, place = StateCodec(self.spec, state.layout), state.layout.chunk_of(chunk)
        return codec.decode(Bitstream.parse(codec.encode(place, state)), place)

    def _answer(self, past: Cache) -> tuple[list[int], torch.Tensor]:
        """Tokens, and the logits after each of the question's and the answer's."""
        logits = [forward(self.model, self.tokens[CONTEXT:], past, every=True)]
        tokens: list[int] = []
        for _ in range(ANSWER):
            tokens.append(int(logits[-1][-1].argmax()))
            logits.append(forward(self.model, tokens[-1:], past, every=True))
        return tokens, torch.cat(logits)


def _valid_from(parts: list[KVCache]) -> tuple[int, ...]:
    """Per layer, where the last gap ends."""
    found = [0] * parts[0].num_layers
    for part in parts:
        for layer, first in enumerate(part.valid_from):
            if first > part.start:
                found[layer] = first
    return tuple(found)


def _said(error: Exception) -> str:
    """On one line, without what a table cannot show."""
    return " ".join(str(error).split()).replace("|", "/") or type(error).__name__
