"""The GPU decoder against the reference: symbols bit by bit, values within 1e-3 of float64.

Needs a CUDA device; where there is none, Triton's interpreter can run a small case on the CPU:
`TRITON_INTERPRET=1 pytest -m gpu tests/codec/test_klt_triton.py` (minutes).
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.spec import ModelSpec, RopeSpec
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.codec.klt.gpu_launch import Batching
from kdn.codec.klt.kinds import KIND_DIGITS, KIND_ENTERING, KIND_MEANS, KIND_SINKS
from kdn.codec.klt.means import MeanCoder
from kdn.errors import KdnError
from tests.codec import klt_profile, klt_reference
from tests.codec.klt_planes import Planes
from tests.codec.klt_profile import parts, without_coarse

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HAS_TRITON and (torch.cuda.is_available() or INTERPRETED)),
        reason="needs a CUDA device and Triton",
    ),
]
PLAIN = RopeSpec(tuple(10000.0 ** (-i / 8) for i in range(8)))
MIXED = (
    PLAIN,
    None,
    RopeSpec(tuple(10000.0 ** (-i / 8) for i in range(8)), 1.3, True),
    RopeSpec((1.0, 0.3, 0.05)),
)
BOUND = 1e-3
"""Relative to float64, in the Euclidean norm."""


SMALL = RopeSpec((1.0, 0.1))
"""Of heads of 4 channels: few rows, which the interpreter takes long over."""


def spec_of(ropes: tuple[RopeSpec | None, ...], heads: int = 4) -> ModelSpec:
    count, size = len(ropes), 4 if SMALL in ropes else 16
    return ModelSpec(count, heads, size, 1000, ropes, (None,) * count, bytes(range(16)))


class Case:
    """A context of a model that never ran, its streams, and their exact decoding."""

    def __init__(
        self,
        spec: ModelSpec,
        num_tokens: int,
        step: float = 0.5,
        leading: int = 0,
        run_rows: int = 0,
        coarse: bool = True,
        means: bool = False,
        beyond: int = 0,
    ) -> None:
        self.spec = spec
        meta, tensors = parts(spec, leading=leading, run_rows=run_rows, means=means, beyond=beyond)
        if not coarse:
            meta, tensors = without_coarse(meta, tensors)
        # A prediction that is no larger than what it predicts.
        tensors["predict.mix_scale"] /= 10
        # Classes that come back within a block: each row has tables of its own.
        for name in ("sink.scale", "fix.scale"):
            tensors[name] = np.resize([40, 43, 40, 45, 45, 41, 40], len(tensors[name])).astype("u1")
        self.codec = KltCodec(spec, Profile.build(meta | {"finest_step": step}, tensors))
        rng = np.random.default_rng(num_tokens)
        names = Namespace(spec.fingerprint, self.codec.profile_id)
        self.chunks = cut(rng.integers(0, spec.vocab_size, num_tokens), names, whole=True)
        shape = (spec.num_layers, num_tokens, spec.num_kv_heads, spec.head_dim)
        keys, values = (torch.from_numpy(rng.normal(size=shape)).float() for _ in range(2))
        self.cache = KVCache(keys, values)
        self.data = self.codec.encode_all(self.chunks, self.cache)
        self.streams = [Bitstream.parse(data) for data in self.data]

    def reference(self, levels: int) -> KVCache:
        parts = [
            klt_reference.decode(self.codec, stream, chunk, levels)
            for stream, chunk in zip(self.streams, self.chunks, strict=True)
        ]
        keys, values = (torch.cat(side, 1) for side in zip(*((p.keys, p.values) for p in parts),
                                                           strict=True))  # fmt: skip
        return KVCache(keys, values)

    def poisoned(self, dtype: torch.dtype = torch.float32) -> KVCache:
        sides = (torch.full(self.cache.keys.shape, 7e4).to(dtype).to(DEVICE) for _ in range(2))
        return KVCache(*sides)


def error(found: KVCache, expected: KVCache) -> float:
    wrong, size = 0.0, 0.0
    for a, b in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.isfinite(a.float()).all()
        wrong += float((a.cpu().double() - b).square().sum())
        size += float(b.square().sum())
    return float(np.sqrt(wrong / size))


def decoder_of(case: Case, heads: range | None = None):  # type: ignore[no-untyped-def]
    from kdn.codec.klt.decoder_triton import GpuDecoder

    return GpuDecoder(case.spec, case.codec.profile, DEVICE, heads)


def slots_of(chunks: list[Chunk]) -> list[np.ndarray]:
    return [np.arange(chunk.start, chunk.end) for chunk in chunks]


def decode(case: Case, decoder, out: KVCache, levels: int) -> list[int]:  # type: ignore[no-untyped-def]
    from kdn.codec.klt.decoder_triton import Target

    target = Target.of_cache(out, case.chunks)
    failed: list[int] = decoder.decode(
        case.streams, case.chunks, levels, target, slots_of(case.chunks)
    )
    return failed


@pytest.mark.parametrize("num_tokens", [16] if INTERPRETED else [16, 48, 304, 1024 + 240])
@pytest.mark.parametrize("ropes", [(PLAIN,) * 4, MIXED], ids=["plain", "mixed"])
def test_values_are_close_to_float64(num_tokens: int, ropes: tuple[RopeSpec | None, ...]) -> None:
    case = Case(spec_of(ropes), num_tokens)
    decoder = decoder_of(case)
    for levels in (3,) if INTERPRETED else (1, 2, 3):
        out = case.poisoned()
        assert decode(case, decoder, out, levels) == []
        assert error(out, case.reference(levels)) < BOUND


def test_all_levels_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one too, near-lossless: nearer to the cache than a step of it. Bit by bit what the
    reference finds, then as close to it as rounding allows."""
    case = Case(spec_of((SMALL, None)), 48)
    decoder, out = decoder_of(case), case.poisoned()
    planes = Planes(decoder, monkeypatch)
    assert decode(case, decoder, out, 4) == []
    planes.check(case.codec, case.streams, case.chunks, 4)
    assert error(out, case.reference(4)) < BOUND
    exact = KVCache(case.cache.keys.double(), case.cache.values.double())
    assert error(out, exact) < 0.01


def test_runs_are_found_and_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of section: components that enter, digits, errors and first tokens."""
    case = Case(spec_of((SMALL, None)), 48 if INTERPRETED else 304, run_rows=8)
    decoder, out = decoder_of(case), case.poisoned()
    planes = Planes(decoder, monkeypatch)
    assert decode(case, decoder, out, 4) == []
    planes.check(case.codec, case.streams, case.chunks, 4)
    assert error(out, case.reference(4)) < BOUND


@pytest.mark.parametrize("kind", [KIND_ENTERING, KIND_DIGITS, KIND_SINKS])
@pytest.mark.parametrize("word", [0, 1, 2])
def test_wrong_sizes_of_runs_are_noticed(kind: int, word: int) -> None:
    """Also sizes by which a run would lie far outside."""
    case = Case(spec_of((SMALL, None)), 16, run_rows=8)
    header = case.streams[0].header
    entry = next(e for e in header.entries if e.kind == kind and e.level < 2)
    spoilt = bytearray(case.data[0])
    spoilt[entry.offset + 2 * word + 1] ^= 0x7F
    case.streams = [Bitstream.of(header, spoilt, verified=range(4))]
    out = case.poisoned()
    assert decode(case, decoder_of(case), out, 2) == [0]
    assert torch.all(out.keys == 7e4)


@pytest.mark.parametrize("groups_at_once", [1] if INTERPRETED else [1, 2])
def test_two_stages_are_two_products(groups_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is rounded between them here, so the last level is left to the reference."""
    ropes = (SMALL, None) if INTERPRETED else (PLAIN,) * 4
    case = Case(spec_of(ropes), 16 if INTERPRETED else 304, leading=24 if INTERPRETED else 96)
    decoder = decoder_of(case)
    plan = Batching(len(case.chunks), groups_at_once)
    monkeypatch.setattr(decoder, "plan", lambda *_: plan)
    for levels in (3,) if INTERPRETED else (1, 2, 3):
        out = case.poisoned()
        assert decode(case, decoder, out, levels) == []
        assert error(out, case.reference(levels)) < BOUND


@pytest.mark.parametrize("beyond", [0, 4])
@pytest.mark.parametrize("leading", [0, 24 if INTERPRETED else 96])
def test_means_are_added(leading: int, beyond: int) -> None:
    """Chunk by chunk, to all tokens but the first; those of the last level at hand."""
    ropes = (SMALL, None) if INTERPRETED else MIXED
    num_tokens = 272 if INTERPRETED else 304
    case = Case(spec_of(ropes), num_tokens, leading=leading, means=True, beyond=beyond)
    decoder = decoder_of(case)
    for levels in (3 if beyond else 1,) if INTERPRETED else (1, 2, 3):
        out, plain = case.poisoned(), case.poisoned()
        assert decode(case, decoder, out, levels) == []
        expected = case.reference(levels)
        assert error(out, expected) < BOUND
        for stream, chunk in zip(case.streams, case.chunks, strict=True):
            case.codec.decode(stream, chunk, levels=levels, out=plain.slice(chunk.start, chunk.end))
        assert error(plain, expected) < 0.02


@pytest.mark.parametrize("level", [0, 1])
def test_damaged_means_are_noticed(level: int) -> None:
    case = Case(spec_of((SMALL, None)), 16, means=True)
    header = case.streams[0].header
    entry = next(e for e in header.entries if e.kind == KIND_MEANS and e.level == level)
    spoilt = bytearray(case.data[0])
    spoilt[entry.offset + 5] ^= 0x10
    case.streams = [Bitstream.of(header, spoilt, verified=range(4))]
    out = case.poisoned()
    assert decode(case, decoder_of(case), out, level + 1) == [0]
    assert torch.all(out.keys == 7e4)
    assert decode(case, decoder_of(case), out, level + 2) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_means_that_overflow_between_the_stages_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them is within what 16 bits hold, their sums are not."""
    monkeypatch.setitem(globals(), "parts", parts_of_large_sums)
    case = Case(spec_of((SMALL, None)), 16, leading=24, means=True)
    decoder, out = decoder_of(case), case.poisoned()
    assert decode(case, decoder, out, 1) == []
    one = float(decoder.synthesis.row_factor.max()) * 9 / 16**0.5
    large = int(50_000 / one)
    assert 1 <= large < 1 << 15
    monkeypatch.setattr(MeanCoder, "round", lambda _, exact: np.full(exact.shape, large, np.int32))
    case.data = case.codec.encode_all(case.chunks, case.cache)
    case.streams = [Bitstream.parse(data) for data in case.data]
    out = case.poisoned()
    assert decode(case, decoder, out, 1) == [0]
    assert torch.all(out.keys == 7e4)


def parts_of_large_sums(*given: Any, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of layers so large that those across layers are not made smaller for 16 bits."""
    meta, tensors = klt_profile.parts(*given, **more)
    for group in range(len(meta["groups"])):
        tensors[f"g{group}.rows_scale"] = tensors[f"g{group}.rows_scale"] * np.float32(1e4)
        tensors[f"g{group}.basis_scale"] = tensors[f"g{group}.basis_scale"] * np.float32(10)
    return meta, tensors


def test_two_stages_of_precise_components_alone() -> None:
    case = Case(spec_of((SMALL, None)), 16, leading=24, coarse=False)
    decoder, out = decoder_of(case), case.poisoned()
    assert decode(case, decoder, out, 3) == []
    assert error(out, case.reference(3)) < BOUND


@pytest.mark.skipif(INTERPRETED, reason="slow")
@pytest.mark.parametrize("num_tokens", [16, 304, 1024 + 240])
@pytest.mark.parametrize("ropes", [(PLAIN,) * 4, MIXED], ids=["plain", "mixed"])
def test_the_last_level_is_near_lossless(
    num_tokens: int, ropes: tuple[RopeSpec | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when only one group's errors fit at a time."""
    from kdn.codec.klt import correction_triton

    case = Case(spec_of(ropes), num_tokens)
    decoder, reference = decoder_of(case), case.reference(4)
    for size in (correction_triton.MAX_BYTES, 1):
        monkeypatch.setattr(correction_triton, "MAX_BYTES", size)
        # With 16 bits integers are kept where several groups' values go.
        for dtype, bound in ((torch.float32, BOUND), (torch.bfloat16, 3e-3)):
            out = case.poisoned(dtype)
            assert decode(case, decoder, out, 4) == []
            assert error(out, reference) < bound


@pytest.mark.skipif(INTERPRETED, reason="slow")
@pytest.mark.parametrize("num_tokens", [48, 256, 304])
@pytest.mark.parametrize("levels", [3, 4])
def test_integers_are_those_of_the_reference(
    num_tokens: int, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(spec_of((PLAIN,) * 4), num_tokens)
    decoder = decoder_of(case)
    planes = Planes(decoder, monkeypatch)
    assert decode(case, decoder, case.poisoned(), levels) == []
    planes.check(case.codec, case.streams, case.chunks, levels)


@pytest.mark.skipif(INTERPRETED, reason="slow")
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.bfloat16, 3e-3), (torch.float16, 7e-4), (torch.float8_e4m3fn, 4e-2)],
)
def test_other_dtypes(dtype: torch.dtype, bound: float) -> None:
    case = Case(spec_of((PLAIN,) * 4), 304)
    out = case.poisoned(torch.float32 if dtype == torch.float8_e4m3fn else dtype)
    out = KVCache(out.keys.to(dtype), out.values.to(dtype))
    assert decode(case, decoder_of(case), out, 3) == []
    assert error(KVCache(out.keys.float(), out.values.float()), case.reference(3)) < bound


@pytest.mark.skipif(INTERPRETED, reason="slow")
def test_pages_hold_what_a_plain_cache_does() -> None:
    """A token's slot may be anywhere; what no slot names stays as it was."""
    from kdn.codec.klt.decoder_triton import Target

    case = Case(spec_of((PLAIN,) * 4), 304)
    plain = case.poisoned()
    decoder = decoder_of(case)
    assert decode(case, decoder, plain, 3) == []
    rng, heads, size = np.random.default_rng(3), case.spec.num_kv_heads, case.spec.head_dim
    places = rng.permutation(1000)[:304]
    pages = [torch.full((1000, 2, heads, size), 5.0, device=DEVICE) for _ in case.spec.ropes]
    target = Target.of([p[:, 0] for p in pages], [p[:, 1] for p in pages])
    slots = [places[chunk.start : chunk.end].copy() for chunk in case.chunks]
    slots[1][7] = -1
    assert decoder.decode(case.streams, case.chunks, 3, target, slots) == []
    dropped = case.chunks[1].start + 7
    for layer, page in enumerate(pages):
        for t in range(304):
            found = page[places[t]]
            if t == dropped:
                assert torch.all(found == 5.0)
            else:
                assert torch.equal(found[0], plain.keys[layer, t])
                assert torch.equal(found[1], plain.values[layer, t])
        untouched = np.setdiff1d(np.arange(1000), places)
        assert torch.all(page[torch.from_numpy(untouched).to(DEVICE)] == 5.0)


@pytest.mark.skipif(INTERPRETED, reason="slow")
def test_a_share_of_heads_is_that_part_of_all() -> None:
    case = Case(spec_of((PLAIN,) * 4), 304)
    whole = case.poisoned()
    assert decode(case, decoder_of(case), whole, 2) == []
    for heads in (range(2), range(3, 4)):
        shape = (4, 304, len(heads), 16)
        share = KVCache(*(torch.full(shape, 7e4, device=DEVICE) for _ in range(2)))
        assert decode(case, decoder_of(case, heads), share, 2) == []
        own = slice(heads.start, heads.stop)
        assert torch.allclose(share.keys, whole.keys[:, :, own], atol=1e-4)
        assert torch.allclose(share.values, whole.values[:, :, own], atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_codec_decodes_on_the_device_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(spec_of((PLAIN,) * 4), 304)
    monkeypatch.setattr(case.codec._restorer, "restore", None)  # the reference's last step
    out = case.poisoned(torch.bfloat16)
    case.codec.decode_all(case.streams, case.chunks, out, levels=2)
    assert error(out, case.reference(2)) < 3e-3
    one = case.codec.decode(
        case.streams[1], case.chunks[1], levels=2, out=case.poisoned().slice(256, 304)
    )
    assert torch.allclose(one.keys, out.keys[:, 256:].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_kernels_cannot_do_is_left_to_the_reference() -> None:
    """All levels, and values that fit in no byte."""
    case = Case(spec_of((PLAIN,) * 4), 48, step=0.01)
    decoder, out = decoder_of(case), case.poisoned()
    assert decode(case, decoder, out, 3) == [0]
    for levels in (3, 4):
        out = case.poisoned()
        case.codec.decode_all(case.streams, case.chunks, out, levels=levels)
        cpu = KVCache(torch.empty_like(case.cache.keys), torch.empty_like(case.cache.values))
        case.codec.decode_all(case.streams, case.chunks, cpu, levels=levels)
        assert torch.equal(out.keys.cpu(), cpu.keys)


@pytest.mark.skipif(INTERPRETED, reason="slow")
@pytest.mark.parametrize("levels", [3, 4])
def test_a_damaged_chunk_is_not_written_in_part(
    levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are the others harmed; also where groups are decoded one after the other."""
    from kdn.codec.klt import correction_triton
    from kdn.codec.klt.decoder_triton import Target

    monkeypatch.setattr(correction_triton, "MAX_BYTES", 1)
    case = Case(spec_of((PLAIN,) * 4), 600)
    decoder, sound, found = decoder_of(case), case.poisoned(), case.poisoned()
    assert decode(case, decoder, sound, levels) == []
    header = case.streams[1].header
    # The last section of the last level: of the last group.
    entry = [e for e in header.entries if e.level == levels - 1][-1]
    spoilt = bytearray(case.data[1])
    spoilt[entry.offset + 2] ^= 0x55
    streams = [case.streams[0], Bitstream.of(header, spoilt, verified=range(4)), case.streams[2]]
    target = Target.of(list(found.keys), list(found.values))
    assert decoder.decode(streams, case.chunks, levels, target, slots_of(case.chunks)) == [1]
    own = slice(case.chunks[1].start, case.chunks[1].end)
    for a, b in ((found.keys, sound.keys), (found.values, sound.values)):
        assert torch.all(a[:, own] == 7e4)
        assert torch.equal(a[:, : own.start], b[:, : own.start])
        assert torch.equal(a[:, own.stop :], b[:, own.stop :])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_damage_is_found_and_named() -> None:
    """Words changed behind the digests' back: the kernels notice, the reference says what."""
    case = Case(spec_of((PLAIN,) * 4), 304)
    decoder = decoder_of(case)
    rng, noticed, sound = np.random.default_rng(0), 0, 0
    for _ in range(20):
        streams = [Bitstream.parse(data) for data in case.data]
        header = streams[1].header
        entry = header.entries[int(rng.integers(0, sum(e.level < 3 for e in header.entries)))]
        spoilt = bytearray(case.data[1])
        spoilt[int(rng.integers(entry.offset, entry.end))] ^= 1 << int(rng.integers(0, 8))
        victim = streams[1] = Bitstream.of(header, spoilt, verified=range(4))
        broken = Case.__new__(Case)
        broken.__dict__ = {**case.__dict__, "streams": streams}
        failed = decode(broken, decoder, case.poisoned(), 3)
        assert failed in ([], [1])
        noticed += bool(failed)
        # A changed escape is a sound stream with another value: only its size may be noticed.
        with suppress(KdnError):
            case.codec.decode(victim, case.chunks[1], levels=3)
            sound += 1
            continue
        assert failed == [1]
    assert noticed > 10
    assert sound < 10
