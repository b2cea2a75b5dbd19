"""`kdn bench cluster`: speed beside the servers themselves, faults under load, regions."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from kdn.bench import options
from kdn.bench.cluster.plan import PARTS, QUICK, Plan
from kdn.bench.cluster.report import figures_of, passes_of, print_report
from kdn.bench.cluster.rows import Rows, Run
from kdn.bench.options import JsonFile
from kdn.bench.report import hardware, report_console
from kdn.bench.s3_servers import ENVIRONMENT

NOTES = (
    "All servers, nodes and clients share the cores of one machine: more of them do not make it "
    "faster here.",
    "Not measured: networks other than loopback and its shaped links, power losses of Redis.",
)


def run(
    json_file: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small run: does it all work?")] = False,
    parts: Annotated[str, typer.Option(help="a: speed, b: faults, c: regions.")] = ",".join(PARTS),
    seed: Annotated[int, options.seed("Of the bytes stored.")] = 0,
) -> None:
    """Shards, buckets, nodes and regions: how fast, what faults cost, how fresh names are."""
    chosen = options.words("parts", parts, PARTS)
    results = bench(QUICK if quick else Plan(), chosen, seed, Console(stderr=True), json_file)
    print_report(report_console(), results)


def bench(
    plan: Plan, parts: list[str], seed: int, console: Console, json_file: Path | None = None
) -> dict[str, Any]:
    """Everything, as it goes to JSON."""
    import uvloop

    facts = {name: fact for name, fact in hardware("cpu").items() if name != "torch"}
    about = {"hardware": facts, "commit": facts["commit"], "seed": seed, "parts": parts,
             "notes": list(NOTES)}  # fmt: skip
    rows = Rows(about, console, json_file)
    os.environ.update(ENVIRONMENT)  # of the S3 server that is started: nothing secret
    with TemporaryDirectory(prefix="kdn-cluster-") as folder:
        work = Run(plan, rows, seed, Path(folder))
        for part in parts:
            rows.say(f"part {part}")
            uvloop.run(_run(part, work))
    told = figures_of(rows)
    results = {**told, "passes": passes_of(told)}
    rows.save(results)
    return {**results, **about, "rows": rows.rows}


async def _run(part: str, work: Run) -> None:
    from kdn.bench.cluster.faults import measure_faults
    from kdn.bench.cluster.regions import measure_regions
    from kdn.bench.cluster.speed import measure_speed

    every: dict[str, Callable[[Run], Awaitable[None]]] = {
        "a": measure_speed, "b": measure_faults, "c": measure_regions,
    }  # fmt: skip
    await every[part](work)
