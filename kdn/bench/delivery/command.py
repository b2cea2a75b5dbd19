"""`kdn bench delivery`: what each policy gets over recorded links, beside one who knew them.

Each trace is scaled to several mean rates, its variation kept, and in time, so that the rate
changes within a delivery: TRACE_SECONDS of it pass while the coarsest level would arrive over a
steady link of that mean. A run begins at a random place of the trace. Deadlines are multiples of
the least time in which an oracle gets everything at the coarsest level. Decoding and prefill take
a little longer or shorter than the planner was told, chunk by chunk.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kdn.bench import options
from kdn.bench.delivery.machines import CHUNK_TOKENS, MACHINES, Machine, offers_of
from kdn.bench.delivery.oracle import Oracle
from kdn.bench.delivery.policies import POLICIES, LastBytes
from kdn.bench.delivery.report import PolicyRun, document, plot, print_report
from kdn.bench.delivery.simulate import Scenario, SimulatedResult, simulate
from kdn.bench.delivery.trace import LinkTrace, load_trace
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.processes import in_processes
from kdn.bench.report import report_console, write_json
from kdn.checked import shown
from kdn.delivery.estimate import UNKNOWN, Estimator
from kdn.delivery.plan import Link
from kdn.errors import UnsupportedError

GBIT = 1e9 / 8
RATES_GBIT = (0.05, 0.2, 1.0, 5.0, 25.0)
CONTEXTS = "2048,8192,32768"
MAX_TOKENS = 1 << 20
FACTORS = (1.1, 1.5, 2.0, 4.0)
LATENCY_S = 0.01
TRACE_SECONDS = 20
SPEED_SPREAD = 0.03
"""Standard deviation of the logarithm of how long a chunk's decoding or prefill takes."""

TraceJob = tuple[Path, int, int, tuple[str, ...]]


def run(
    traces: Annotated[Path, typer.Option(help="Folder of network traces (t_s,mbps), *.csv.")],
    policies: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(POLICIES),
    contexts: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = CONTEXTS,
    jobs: Annotated[int, options.count(0, "Processes; 0: one per core.")] = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    seed: Annotated[int, options.seed("Chooses starts, sizes and speeds.")] = 0,
) -> None:
    """Deadlines met and quality of each policy over recorded links, beside an oracle's."""
    names = tuple(options.words("policies", policies, tuple(POLICIES)))
    paths = _traces(traces)
    lengths = [int(one) for one in options.numbers("contexts", contexts, CHUNK_TOKENS, MAX_TOKENS)]
    todo = [(path, tokens, seed, names) for path, tokens in product(paths, lengths)]
    for path in paths:
        load_trace(path)  # a file that is no trace is told at once
    rows = [row for group in in_processes(run_job, todo, jobs, "simulating") for row in group]
    settings = {"seed": seed, "contexts": lengths, "traces": [path.name for path in paths]}
    results = document(rows, names, settings)
    if json_file:
        write_json(json_file, results)
    if plot_file:
        plot(plot_file, results, *example(paths, seed))
    print_report(report_console(), results)


def _traces(folder: Path) -> list[Path]:
    try:
        paths = sorted(folder.glob("*.csv"))
    except (OSError, ValueError):
        paths = []
    if not paths:
        raise UnsupportedError(f"expected traces (*.csv) in {shown(str(folder))}")
    return paths


def run_job(job: TraceJob) -> list[PolicyRun]:
    """All models, rates, deadlines and policies over one trace and context length."""
    path, num_tokens, seed, names = job
    return [
        row
        for machine, rate in product(MACHINES, RATES_GBIT)
        for row in _run_bucket(path, machine, num_tokens, rate, seed, names)
    ]


def _run_bucket(
    path: Path, machine: Machine, num_tokens: int, rate: float, seed: int, names: Sequence[str]
) -> Iterator[PolicyRun]:
    scenario = scenario_of(path, machine, num_tokens, rate, seed)
    oracle = Oracle(scenario)
    least_s = oracle.least_s()
    for factor in FACTORS:
        timed = replace(scenario, deadline_s=factor * least_s)
        best = oracle.best_kld(timed.deadline_s)
        for name in names:
            outcome = simulate(timed, POLICIES[name], meter_of(name, timed))
            bucket = (path.stem, machine.name, num_tokens, rate, factor)
            yield _row(bucket, name, timed, outcome, best)


def _row(
    bucket: tuple[str, str, int, float, float],
    policy: str,
    scenario: Scenario,
    outcome: SimulatedResult,
    best: float,
) -> PolicyRun:
    trace, model, num_tokens, rate, factor = bucket
    return PolicyRun(
        trace=trace,
        model=model,
        num_tokens=num_tokens,
        rate_gbit=rate,
        factor=factor,
        policy=policy,
        deadline_s=scenario.deadline_s,
        met=outcome.met,
        ttft_s=outcome.ttft_s,
        kld=outcome.kld,
        kld_oracle=best,
        num_bytes=outcome.num_bytes,
        plans=outcome.plans,
    )


def scenario_of(path: Path, machine: Machine, num_tokens: int, rate: float, seed: int) -> Scenario:
    """Without its deadline. The same seed gives the same everything."""
    name = f"{path.stem} {machine.name} {num_tokens} {rate}"
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    offers = offers_of(machine, num_tokens, rng)
    slow = np.exp(rng.normal(0, SPEED_SPREAD, (2, len(offers))))
    steady = Scenario(
        offers=offers,
        speeds=machine,
        trace=LinkTrace.steady(rate * GBIT),
        latency_s=LATENCY_S,
        deadline_s=0.0,
        decode_slow=tuple(slow[0].tolist()),
        prefill_slow=tuple(slow[1].tolist()),
    )
    second_s = Oracle(steady).least_s() / TRACE_SECONDS
    recorded = _recorded(path)
    start_s = rng.uniform(0, recorded.period_s * second_s)
    return replace(steady, trace=recorded.scaled(rate * GBIT, second_s, start_s))


@lru_cache(maxsize=2)
def _recorded(path: Path) -> LinkTrace:
    return load_trace(path)


def meter_of(policy: str, scenario: Scenario) -> Estimator | LastBytes:
    """The round trip is known from the look-up, the rate is not."""
    prior = Link(UNKNOWN.rate, UNKNOWN.low_rate, scenario.latency_s)
    if policy == "cachegen":
        sizes = [offer.level_ends[0] for offer in scenario.offers]
        return LastBytes(sum(sizes) // len(sizes), prior)
    return Estimator(prior)


def example(paths: Sequence[Path], seed: int) -> tuple[Scenario, SimulatedResult]:
    """One run for the timeline, over the trace that varies most."""
    path = max(
        paths, key=lambda one: float(np.std(_recorded(one).rates) / _recorded(one).mean_rate)
    )
    scenario = scenario_of(path, MACHINES[1], 8192, 1.0, seed)
    timed = replace(scenario, deadline_s=2 * Oracle(scenario).least_s())
    return timed, simulate(timed, POLICIES["default"], meter_of("default", timed))
