"""The parts of `kdn bench ttft` that need no model: links, packed codecs, the report."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from kdn.bench.report import write_json
from kdn.bench.rivals.cachegen import CacheGenCodec
from kdn.bench.rivals.cachegen_profile import CacheGenProfile
from kdn.bench.rivals.plain import Half, Int8
from kdn.bench.ttft import _links
from kdn.bench.ttft_codecs import PackedCodec, cachegen_at, plain
from kdn.bench.ttft_report import TtftRow, document, plot, print_report
from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.errors import FormatError, UnsupportedError
from tests.codec.conftest import Tiny

TINY = Tiny.with_layers(4)
EXTRA = {"settings": {"context": 4096, "text": "a text"}, "answer": " Yes.", "hardware": {"cpu": 1}}
ROWS = [
    TtftRow("1 Mbit/s", "text", 10.0, 10.0, 10.0, 10.0, 0.0, 0.0, True),
    TtftRow("1 Mbit/s", "fp16", 13.0, 13.0, 13.0, 10.0, stopped=True),
    TtftRow("1 Mbit/s", "klt", 5.0, 4.9, 5.2, 10.0, 0.0071, 0.005, True, 700_000, (0, 2, 2, 3), 1),
]


def chunk_of(codec: PackedCodec) -> tuple[Chunk, KVCache]:
    tokens = np.arange(64) % 50
    [chunk] = cut(tokens, Namespace(codec.spec.fingerprint, codec.profile_id))
    return chunk, TINY.cache(chunk, torch.float32)


@pytest.mark.parametrize(("rival", "bound"), [(Half, 0.0), (Int8, 0.02)])
def test_plain_values_come_back(rival: type[Half], bound: float) -> None:
    codec = plain(rival(TINY.spec))
    chunk, cache = chunk_of(codec)
    found = codec.decode(Bitstream.parse(codec.encode(chunk, cache)), chunk)
    error = (found.keys - cache.keys).abs().max() / cache.keys.abs().max()
    assert float(error) <= bound


@pytest.mark.parametrize("level", [1, 3])
def test_cachegen_at_one_level_is_what_all_its_levels_hold(level: int) -> None:
    calibration = TINY.reseed("calibration")
    samples = [
        calibration.cache(calibration.chunk(bytes(16), 256, i), torch.float32) for i in (0, 1)
    ]
    whole = CacheGenCodec(TINY.spec, CacheGenProfile.fit(TINY.spec, samples))
    codec = cachegen_at(whole, level)
    chunk, cache = chunk_of(codec)
    data = codec.encode(chunk, cache)
    found = codec.decode(Bitstream.parse(data), chunk)
    stream = Bitstream.parse(whole.encode(chunk, cache))
    expected = whole.decode(stream, chunk, levels=level + 1)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)


def test_links_are_rates_and_traces(tmp_path: Path) -> None:
    trace = tmp_path / "train.csv"
    trace.write_text("t_s,mbps\n0,1\n")
    links = _links("1,0.5", str(trace))
    assert links["1 Mbit/s"] == {"egress_bits_per_s": 1_000_000}
    assert links["0.5 Mbit/s"] == {"egress_bits_per_s": 500_000}
    assert links["train"] == {"egress_trace": str(trace)}
    with pytest.raises(FormatError, match="trace"):
        _links("1", str(tmp_path / "none.csv"))
    for wrong in ("0", "nan", "1,,2", "x"):
        with pytest.raises(UnsupportedError, match="mbits"):
            _links(wrong, "")


def test_the_report_tells_all(tmp_path: Path) -> None:
    out = StringIO()
    print_report(Console(file=out, width=160), ROWS, EXTRA)
    text = out.getvalue()
    for part in ("2.00x", "> 13.0", "0.0071", "read 1, 2 x 2, 3 x 1", "4.90 to 5.20"):
        assert part in text
    write_json(tmp_path / "a.json", document(ROWS, EXTRA), allow_nan=False)
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert rows[2]["speedup"] == 2.0
    assert rows[1]["kld"] is None
    plot(tmp_path / "a.png", ROWS)
    assert (tmp_path / "a.png").stat().st_size > 10_000
