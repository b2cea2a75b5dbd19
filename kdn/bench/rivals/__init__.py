"""Every codec of the benchmark by name, ours and others'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kdn.bench.rivals.base import Rival
from kdn.cache.spec import ModelSpec
from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from kdn.bench.calibration import Calibration


def _fp16(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.plain import Half

    return Half(spec)


def _int8(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.plain import Int8

    return Int8(spec)


def _drop(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.plain import Drop

    return Drop(spec)


def _shipped(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.shipped import Shipped

    return Shipped(spec)


def _kvtc(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.kvtc import Kvtc

    return Kvtc(spec, calibration.kvtc(), window=True)


def _kvtc_nowindow(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.kvtc import Kvtc

    return Kvtc(spec, calibration.kvtc(), window=False)


def _cachegen(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.cachegen import CacheGenCodec
    from kdn.bench.rivals.ours import cachegen

    return cachegen(CacheGenCodec(spec, calibration.cachegen()))


def _exact(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.ours import exact
    from kdn.codec.exact import ExactCodec

    return exact(ExactCodec(spec))


def _klt(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.ours import Layered
    from kdn.codec import open_codec

    return Layered(open_codec("klt", spec, calibration.klt_profile))


def _klt_tail(spec: ModelSpec, calibration: Calibration) -> Rival:
    from kdn.bench.rivals.ours import Layered
    from kdn.codec import open_codec

    return Layered(open_codec("klt", spec, calibration.klt_profile), name="klt-tail", tail_levels=1)


_OPENERS: dict[str, Callable[[ModelSpec, Calibration], Rival]] = {
    "fp16": _fp16,
    "exact": _exact,
    "int8": _int8,
    "cachegen-shipped": _shipped,
    "cachegen": _cachegen,
    "kvtc": _kvtc,
    "kvtc-nowindow": _kvtc_nowindow,
    "drop": _drop,
    "klt": _klt,
    "klt-tail": _klt_tail,
}
NAMES = tuple(_OPENERS)


def open_rivals(names: Sequence[str], spec: ModelSpec, calibration: Calibration) -> list[Rival]:
    """The named codecs for a model; those that learn from text are fitted to `calibration`."""
    for name in names:
        if name not in _OPENERS:
            raise UnsupportedError(f"expected codecs of {', '.join(NAMES)}; found {name!r}")
    return [_OPENERS[name](spec, calibration) for name in names]
