"""`kdn bench cache`: what eviction policies make of recorded requests, beside the best there is.

Each trace is replayed (`cache_replay`) at a few capacities, given as parts of its footprint: all
distinct blocks of the trace. The token hit ratio is the part of all prompt tokens that need no
prefill; the seconds saved weigh them by a model's prefill time, which grows with position.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import typer

from kdn.bench import options
from kdn.bench.cache_replay import Replay
from kdn.bench.cache_report import OPTIMUM, CacheRow, document, plot, print_report
from kdn.bench.cache_traces import load_trace
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.processes import in_processes
from kdn.bench.report import report_console, write_json
from kdn.store.evict import POLICIES

SHARES = (0.01, 0.05, 0.2)

ReplayJob = tuple[Path, int, str, float]


def run(
    requests: Annotated[
        list[Path], options.files("Request traces (.jsonl, .jsonl.gz); repeatable.")
    ],
    policies: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(POLICIES),
    jobs: Annotated[int, options.count(0, "Processes; 0: one per core.")] = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    seed: Annotated[int, options.seed("Chooses when recorded sessions begin.")] = 0,
) -> None:
    """Token hit ratio of each eviction policy on recorded requests, beside the optimum."""
    names = options.words("policies", policies, tuple(POLICIES))
    todo = [
        (path, seed, name, share)
        for path in dict.fromkeys(requests)
        for share in SHARES
        for name in (*names, OPTIMUM)
    ]
    for path in dict.fromkeys(requests):
        load_trace(path)  # a file that is no trace is told at once
    rows = in_processes(replay, todo, jobs, "replaying")
    if json_file:
        write_json(json_file, document(rows, {"policies": names, "seed": seed}))
    if plot_file:
        plot(plot_file, rows)
    print_report(report_console(), rows)


def replay(job: ReplayJob) -> CacheRow:
    """One policy at one capacity."""
    path, seed, name, share = job
    prepared = _prepared(path, seed)
    capacity_blocks = max(1, round(share * prepared.trace.footprint_blocks))
    started_s = time.perf_counter()
    if name == OPTIMUM:
        outcome = prepared.optimum(capacity_blocks)
    else:
        outcome = prepared.run(POLICIES[name](), capacity_blocks)
    return CacheRow(
        trace=prepared.trace.name,
        requests=len(prepared.trace.requests),
        footprint_tokens=prepared.trace.footprint_blocks * prepared.trace.block_tokens,
        share=share,
        policy=name,
        token_hit_ratio=outcome.token_hit_ratio,
        saved_ratio=outcome.saved_ratio,
        hit_kld=outcome.hit_kld,
        exact_hit_ratio=outcome.exact_hit_ratio,
        replay_s=time.perf_counter() - started_s,
    )


@lru_cache(maxsize=1)
def _prepared(path: Path, seed: int) -> Replay:
    return Replay(load_trace(path, seed))
