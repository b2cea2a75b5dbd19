"""Replaying requests: exact hits on small traces, the optimum against all choices, the command."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kdn.bench.cache_replay import HitRatios, Replay, prefill_s
from kdn.bench.cache_traces import RecordedRequest, RequestTrace, load_trace
from kdn.cli.main import app, spread
from kdn.errors import FormatError
from kdn.store.evict import LRU, CostAware, Graded

BLOCK = 512


def trace_of(*chains: str) -> RequestTrace:
    """Each letter a block; equal letters after equal letters are the same block."""
    lines = [
        {"timestamp": 1000 * i, "input_length": BLOCK * len(chain), "hash_ids": list(chain)}
        for i, chain in enumerate(chains)
    ]
    return written(lines)


def written(lines: list[dict[str, object]], name: str = "t.jsonl") -> RequestTrace:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text("\n".join(map(json.dumps, lines)))
        return load_trace(path)


def tokens_hit(outcome: HitRatios, trace: RequestTrace) -> float:
    return outcome.token_hit_ratio * sum(request.num_tokens for request in trace.requests)


# traces


def test_mooncake_blocks_are_named_by_their_whole_prefix() -> None:
    trace = trace_of("ab", "abc", "xb")
    assert [request.blocks for request in trace.requests] == [[0, 1], [0, 1, 2], [3, 4]]
    assert trace.parents == [None, 0, 1, None, 3]
    assert (trace.block_tokens, trace.footprint_blocks) == (512, 5)
    assert [request.time_s for request in trace.requests] == [0.0, 1.0, 2.0]


def test_sessions_are_merged_by_time_and_blocks_joined_into_chunks() -> None:
    def request(t: float, *runs: list[int]) -> dict[str, object]:
        count = sum(n for _, n in runs)
        return {"t": t, "type": "n", "in": 64 * count + 10, "hash_runs": runs}

    subagent = {"t": 50.0, "type": "subagent", "requests": [request(3.0, [100, 8])]}
    lines: list[dict[str, object]] = [
        {"block_size": 64, "requests": [request(0.0, [1, 9]), subagent, request(90.0, [1, 4])]},
        {"block_size": 64, "requests": [request(0.0, [1, 8]), request(9.0, [1, 4], [50, 4])]},
    ]
    trace = written(lines)
    assert trace.block_tokens == 256
    times = [r.time_s for r in trace.requests]
    assert times == sorted(times)
    assert max(times) < 3600 + 90
    # 9 blocks are two chunks; the sessions share nothing; the second's two prompts share a chunk
    assert sorted(len(r.blocks) for r in trace.requests) == [1, 2, 2, 2, 2]
    assert trace.footprint_blocks == 2 + 2 + 2 + 1
    first = [r for r in trace.requests if r.num_tokens == 64 * 9 + 10]
    inner = [r for r in trace.requests if r.time_s == first[0].time_s + 53.0]
    assert [len(r.blocks) for r in inner] == [2]


def test_gzip_and_seeds(tmp_path: Path) -> None:
    line = {"block_size": 64, "requests": [{"t": 1, "type": "n", "in": 256, "hash_runs": [[1, 4]]}]}
    path = tmp_path / "s.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    assert load_trace(path).name == "s"
    assert load_trace(path, 1) == load_trace(path, 1)
    assert load_trace(path, 1).requests[0].time_s != load_trace(path, 2).requests[0].time_s


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nothing", '{"hash_ids": 3}', '{"requests": 1}'])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError, match="wrong"):
        load_trace(path)
    with pytest.raises(FormatError):
        load_trace(tmp_path / "absent.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-9])
    with pytest.raises(FormatError):
        load_trace(tmp_path / "cut.jsonl.gz")


# replay


def test_prefill_follows_what_was_measured() -> None:
    for tokens, measured_s in ((2048, 0.059), (8192, 0.260), (16384, 0.574), (32768, 1.378)):
        assert prefill_s(tokens) == pytest.approx(measured_s, rel=0.01)


def test_only_a_whole_prefix_hits() -> None:
    # LRU of two: a, b, c leave b and c, so the second prompt finds nothing though b and c are here
    trace = trace_of("abc", "abc")
    assert Replay(trace).run(LRU(), 2).token_hit_ratio == 0
    # from the tail: a and b stay
    assert tokens_hit(Replay(trace).run(CostAware(), 2), trace) == 2 * BLOCK


def test_hits_and_seconds_are_counted_exactly() -> None:
    trace = trace_of("ab", "abc", "x", "ab")
    outcome = Replay(trace).run(LRU(), 10)
    assert tokens_hit(outcome, trace) == 4 * BLOCK
    saved_s = 2 * prefill_s(2 * BLOCK)
    all_s = 2 * prefill_s(2 * BLOCK) + prefill_s(3 * BLOCK) + prefill_s(BLOCK)
    assert outcome.saved_ratio == pytest.approx(saved_s / all_s)


def test_a_partly_filled_last_block_counts_its_own_tokens() -> None:
    lines: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": BLOCK + 100, "hash_ids": [1, 2]} for _ in range(2)
    ]
    trace = written(lines)
    assert tokens_hit(Replay(trace).run(LRU(), 10), trace) == BLOCK + 100


CHAINS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=7)


@settings(deadline=None, max_examples=60)
@given(CHAINS, st.integers(1, 4))
def test_the_optimum_is_the_best_of_all_choices(chains: list[str], capacity: int) -> None:
    trace = trace_of(*chains)
    replay = Replay(trace)
    optimum = tokens_hit(replay.optimum(capacity), trace)
    assert optimum == BLOCK * _best_by_trying_all(trace.requests, capacity)
    for policy in (LRU(), CostAware()):
        assert tokens_hit(replay.run(policy, capacity), trace) <= optimum + 1e-6


def _best_by_trying_all(requests: list[RecordedRequest], capacity: int) -> int:
    """Most block hits under the prefix rule, over every subset kept after every request."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            gained = next(
                (i for i, b in enumerate(request.blocks) if b not in kept), len(request.blocks)
            )
            union = sorted(kept | set(request.blocks))
            for subset in combinations(union, min(capacity, len(union))):
                key = frozenset(subset)
                after[key] = max(after.get(key, 0), hits + gained)
        best = after
    return max(best.values())


def test_the_optimum_of_a_loop() -> None:
    # a b c a b c ... with room for two: Belady hits on all but one in two after the first round
    trace = trace_of(*("abc" * 4))
    assert tokens_hit(Replay(trace).run(LRU(), 2), trace) == 0
    assert tokens_hit(Replay(trace).optimum(2), trace) == 6 * BLOCK


# the command


def test_the_command_tells_a_table_json_and_a_plot(tmp_path: Path) -> None:
    lines = [
        {"timestamp": i, "input_length": 3 * BLOCK, "hash_ids": [0, 1 + i % 7, 100 + i % 11]}
        for i in range(300)
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    told, drawn = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["bench", "cache", "--json", str(told), "--plot", str(drawn), "--jobs", "1"]
    result = CliRunner().invoke(app, spread([*arguments, "--requests", str(path)]))
    assert result.exit_code == 0, result.output
    assert "small" in result.output
    assert drawn.read_bytes().startswith(b"\x89PNG")
    document = json.loads(told.read_text())
    assert len(document["rows"]) == 3 * 5
    shares = document["token_hit_ratio"]["small"]
    assert list(shares) == ["0.01", "0.05", "0.2"]
    for ratios in shares.values():
        assert list(ratios) == ["lru", "s3fifo", "cost", "graded", "optimum"]
        assert ratios.pop("graded") >= ratios["cost"], "it holds more blocks, with fewer levels"
        assert all(0 <= ratio <= ratios["optimum"] for ratio in ratios.values())


def test_hits_are_told_with_the_levels_they_come_with() -> None:
    """Room for two whole blocks of three: `cost` drops one of them, `graded` cuts some, by a
    request for the default quality they all hit, and none of those is exact."""
    trace = trace_of("a", "b", "c", "a", "b", "c")
    replay = Replay(trace)
    whole, cut = replay.run(CostAware(), 2), replay.run(Graded(), 2)
    assert tokens_hit(cut, trace) == 3 * BLOCK
    assert tokens_hit(whole, trace) < 3 * BLOCK
    assert whole.hit_kld in (0.0, 0.0003)
    assert 0.0003 < cut.hit_kld <= 0.003
    assert cut.exact_hit_ratio < cut.token_hit_ratio
    assert whole.exact_hit_ratio == whole.token_hit_ratio


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("")
    given = ["bench", "cache", "--requests", str(path), "--policies", "mru"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code != 0
    assert "mru" in str(result.exception)
