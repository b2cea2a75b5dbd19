"""`kdn bench vllm --device cuda`, scripted: what is asked of an engine, and of a real node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kdn.bench.vllm_gpu import beside, measure
from kdn.bench.vllm_gpu.beside import ALONE, LOADS, ORDER, PUBLISHING, beside_runs, shares
from kdn.bench.vllm_gpu.checkpoint import SHAPES, write_checkpoint
from kdn.bench.vllm_gpu.measure import KdnBench, Task, ask, engine_of, plain_rows
from kdn.bench.vllm_gpu.streams import EXPECTED_KLD, QUALITIES, Drawn, draw, put_all
from kdn.bench.vllm_gpu.systems import (
    HOST,
    LOOPBACK,
    NODE,
    kdn,
    lmcache,
    no_cache,
    offloading,
)
from kdn.cache.spec import ModelSpec
from kdn.cache.tensors import KVCache
from kdn.codec.format import Bitstream
from kdn.codec.klt import KltCodec, Profile
from kdn.delivery.planner import WORST
from kdn.delivery.request import BODY_KLD, TAIL_KLD, enough_levels
from kdn.engines.checkpoint import spec_of_checkpoint
from kdn.engines.vllm.settings import Settings
from kdn.places.places import open_places

QUIET = Console(quiet=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpu") / "model", SHAPES["tiny"], CPU, 0)


@pytest.fixture(scope="module")
def spec(model: Path) -> ModelSpec:
    return spec_of_checkpoint(model, torch.float32)


@pytest.fixture(scope="module")
def drawn(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return draw(spec, "grouped", tmp_path_factory.mktemp("drawn"), CPU, 0)


def task(model: Path, **more: Any) -> Task:
    given: dict[str, Any] = {
        "model": model, "vocabulary": 512, "contexts": (512, 768), "levels": (3, 2), "repeats": 3,
        "device": "cpu", "python": sys.executable, "seed": 0,
    }  # fmt: skip
    return Task(**given | more)


def test_a_checkpoint_is_written_once(model: Path, spec: ModelSpec, tmp_path: Path) -> None:
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 4, 64, 512)
    before = (model / "model-00000.safetensors").stat().st_mtime_ns
    assert write_checkpoint(model, SHAPES["tiny"], CPU, 0) == model
    assert (model / "model-00000.safetensors").stat().st_mtime_ns == before
    other = write_checkpoint(tmp_path / "other", SHAPES["tiny"], CPU, 1)
    assert spec_of_checkpoint(other, torch.float32).fingerprint != spec.fingerprint
    assert SHAPES["8b"].token_bytes == 131072


@pytest.mark.parametrize("levels", QUALITIES)
def test_a_quality_asks_for_so_many_levels_of_every_chunk(levels: int) -> None:
    quality = QUALITIES[levels]
    assert enough_levels(EXPECTED_KLD, quality * TAIL_KLD) == levels
    assert enough_levels(EXPECTED_KLD, quality * BODY_KLD) == levels
    assert EXPECTED_KLD[levels - 2] > WORST * quality


def test_wrapped_streams_are_those_of_the_prompt(drawn: Drawn, model: Path) -> None:
    codec = KltCodec(drawn.spec, Profile.load(drawn.profile_file))
    assert codec.expected_kld == EXPECTED_KLD
    found = list(drawn.streams_of(task(model).prompt(768)))
    assert [chunk.start for chunk, _ in found] == [0, 256, 512]
    for chunk, data in found:
        stream = Bitstream.parse(data)
        stream.check_for(chunk, drawn.spec, codec.profile_id, codec.codec_id)
        for levels in (2, 3):
            cache = codec.decode(stream, chunk, levels=levels)
            assert torch.isfinite(cache.keys).all()
        assert stream.level_end(3) == stream.level_end(2)  # the last is empty
        assert cache.values.std() > 0.1
    bits = drawn.bits()
    assert bits[0] < bits[1] < bits[2] < bits[3]
    per_value = len(found[1][1]) * 8 / 256 / drawn.spec.values_per_token
    assert per_value == pytest.approx(bits[2], rel=0.1)


def test_what_was_drawn_is_read_again(drawn: Drawn, spec: ModelSpec) -> None:
    again = draw(spec, "grouped", drawn.profile_file.parents[1], CPU, 0)
    assert again.profile_id == drawn.profile_id
    assert [one.stream_id for one in again.streams] == [one.stream_id for one in drawn.streams]


async def _found(folder: Path, drawn: Drawn, tokens: list[int]) -> list[bool]:
    async with open_places([str(folder)]) as places:
        keys = [chunk.key for chunk in drawn.chunks(tokens)]
        return [one is not None for one in await places.publish_to.store.lookup(keys)]


def test_streams_are_stored_under_the_names_that_engines_ask_for(
    drawn: Drawn, model: Path, tmp_path: Path
) -> None:
    import asyncio

    prompts = [task(model).prompt(512), task(model).prompt(768, 1)]
    sizes = put_all(str(tmp_path), drawn, prompts)
    assert sizes[1] == pytest.approx(1.5 * sizes[0], rel=0.2)
    assert asyncio.run(_found(tmp_path, drawn, prompts[1])) == [True] * 3 + [False]


WORKER = """
import json, sys
settings = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True, "vllm": "0", "engine": settings["engine"]}), flush=True)
asked = 0
for line in sys.stdin:
    told = json.loads(line)
    do = told["do"]
    if do == "ask":
        asked += 1
        context = len(told["tokens"]) - 16
        held = context if asked > 3 else 0
        extra = (settings["transfer"] or {}).get("kv_connector_extra_config", {})
        folder = extra.get("host_folder")
        if folder and held:
            open(f"{folder}/{context}", "wb").write(bytes(1000))
        counts = {"host_tokens": held}
        one = {"ttft_s": 0.5, "hit_tokens": context, "token": 1, "counts": counts}
        answer = {"answers": [one] * told["repeats"]}
    elif do == "beside":
        slow = 0.1 * bool(told["others"]) + 0.2 * told["kdn"]["publish"]
        answer = {"tokens": 800, "seconds": 1 + slow, "steps": 100, "sent": len(told["others"]),
                  "ttft_s": [0.04] * len(told["others"]), "counts": {}}
    elif do == "flush":
        answer = {"flush_s": 0.1}
    elif do == "memory":
        answer = {"used_bytes": 5, "kdn_bytes": 3, "pinned_bytes": 1}
    else:
        answer = {"error": "what?"}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(measure, "WORKER", worker)
    return tmp_path


def test_a_rival_reads_each_prompt_before_it_is_asked(scripted: Path, model: Path) -> None:
    rows = list(plain_rows(task(model), offloading(), scripted, 100, QUIET))
    assert [(row.context, len(row.answers)) for row in rows] == [(512, 3), (768, 3)]
    assert [row.stored_bytes for row in rows] == [51200, 76800]
    assert rows[0].engine is not None
    assert rows[0].engine["used_bytes"] == 5
    assert rows[0].engine["engine"]["enable_prefix_caching"] is True
    [first, _] = plain_rows(task(model), no_cache(), scripted, 100, QUIET)
    assert first.stored_bytes == 0
    assert first.engine is not None
    assert first.engine["engine"]["enable_prefix_caching"] is False


def test_prompts_come_from_the_host_before_they_are_timed(
    scripted: Path, model: Path, drawn: Drawn
) -> None:
    one = task(model, contexts=(512,), levels=(3,))
    bench = KdnBench(one, drawn, "grouped", scripted, QUIET)
    with bench.host_engine() as engine:
        [row] = bench.host_rows(engine)
    assert (row.system, row.levels, row.stored_bytes) == (HOST, 3, 1000)
    assert [answer["counts"]["host_tokens"] for answer in row.answers] == [512] * 3


def test_one_engine_is_asked_over_every_link(scripted: Path, model: Path, drawn: Drawn) -> None:
    bench = KdnBench(task(model, contexts=(512,)), drawn, "pairs", scripted, QUIET)
    rows = list(bench.node_rows([LOOPBACK, "10 Gbit/s"]))
    assert [(row.link, row.levels) for row in rows] == [
        (LOOPBACK, 3), (LOOPBACK, 2), ("10 Gbit/s", 3), ("10 Gbit/s", 2),
    ]  # fmt: skip
    assert {row.system for row in rows} == {NODE}
    assert rows[0].stored_bytes > 10_000
    log = scripted / "pairs" / "node" / "kdn.log"
    assert log.exists()


def test_variants_alternate_and_are_held_against_their_neighbours(
    scripted: Path, model: Path, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "BESIDE_TOKENS", 512)
    one = task(model, contexts=(512,), levels=(3,))
    bench = KdnBench(one, drawn, "grouped", scripted, QUIET)
    with bench.host_engine() as engine:
        runs = list(beside_runs(one, bench, engine, 2, 32))
    assert [run["variant"] for run in runs] == [*ORDER, *ORDER, ALONE]
    found = shares(runs)
    assert found[LOADS]["share"] == pytest.approx(1 / 1.1)
    assert found[LOADS]["ttft_s"] == 0.04
    assert found[PUBLISHING]["every"] == pytest.approx([1 / 1.2] * 2)
    assert found[PUBLISHING]["ttft_s"] is None


def test_a_request_may_only_be_stricter_than_its_engine(drawn: Drawn, tmp_path: Path) -> None:
    system = kdn(HOST, "http://127.0.0.1:1", drawn, tmp_path)
    assert system.transfer is not None
    settings = Settings.parse(system.transfer["kv_connector_extra_config"])
    for quality in QUALITIES.values():
        assert settings.for_request({"kdn": {"quality": quality}}).quality == quality


def test_other_connectors_get_room_for_all_prompts() -> None:
    assert lmcache().environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "12"
    extra = offloading().settings(Path("m"), 40_000, "cuda")["transfer"]
    assert extra["kv_connector_extra_config"] == {"cpu_bytes_to_use": 12 << 30}
    assert (2048 + 8192 + 32768) * SHAPES["8b"].token_bytes < 12 << 30


def test_a_worker_that_fails_says_so(scripted: Path, model: Path) -> None:
    with (
        engine_of(task(model), no_cache(), scripted) as engine,
        pytest.raises(measure.EngineError, match="what"),
    ):
        engine.call({"do": "nonsense"})
    with engine_of(task(model), no_cache(), scripted) as engine:
        assert len(ask(engine, [1] * 20, 2)) == 2


def test_prompts_differ_by_number_and_length(model: Path) -> None:
    one = task(model)
    prompts = [one.prompt(512), one.prompt(512, 1), one.prompt(768)]
    assert [len(prompt) for prompt in prompts] == [528, 528, 784]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 3
    assert one.prompt(512) == prompts[0]


def test_caches_of_a_rate_take_the_bits_that_it_says() -> None:
    from kdn.bench.gpu_model import RATES, Synthetic, encode_many
    from kdn.cache.spec import RopeSpec

    turns = RopeSpec(tuple(500000.0 ** (-i / 48) for i in range(48)))
    spec = ModelSpec(2, 4, 96, 1024, (turns,) * 2, (None,) * 2, bytes(16))
    wanted = {"grouped": (0.06, 0.23, 0.58), "pairs": (0.37, 0.88, 1.45)}
    for name, rate in RATES.items():
        synthetic = Synthetic.build(spec, 2, 0, CPU, sample_chunks=2, rate=rate)
        chunks = synthetic.context(2 * 256, 5)
        stream = Bitstream.parse(encode_many(synthetic, chunks, 9)[1])
        values = 256 * spec.values_per_token
        bits = [(stream.level_end(n) - stream.header.size_bytes) * 8 / values for n in range(3)]
        assert bits == pytest.approx(wanted[name], rel=0.1)
        cache: KVCache = synthetic.codec.decode(stream, chunks[1], levels=3)
        assert torch.isfinite(cache.keys).all()
