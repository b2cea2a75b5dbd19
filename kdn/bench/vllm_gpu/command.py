"""`kdn bench vllm --device cuda`: the first token of a real vLLM on a GPU, by where caches are.

One engine for each system and rate, each started once. After every figure the JSON is written: what
was measured by then is not lost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kdn.bench import options
from kdn.bench.gpu_model import RATES
from kdn.bench.report import hardware, report_console, write_json
from kdn.bench.vllm_engine import has_package, need_vllm
from kdn.bench.vllm_gpu.beside import beside_runs
from kdn.bench.vllm_gpu.checkpoint import SHAPES, write_checkpoint
from kdn.bench.vllm_gpu.measure import GpuRow, KdnBench, Task, plain_rows
from kdn.bench.vllm_gpu.report import document, plot, print_report
from kdn.bench.vllm_gpu.streams import QUALITIES, Drawn, draw
from kdn.bench.vllm_gpu.systems import (
    CONNECTIONS,
    LINKS,
    NODE_FETCHER,
    lmcache,
    no_cache,
    offloading,
)
from kdn.engines.checkpoint import spec_of_checkpoint
from kdn.errors import KdnError

SYSTEMS = ("none", "offloading", "lmcache", "kdn-host", "kdn-node", "beside")
MORE_SYSTEMS = ("kdn-node-fetcher",)
"""Measured only where they are asked for."""
PLAIN = {"none": no_cache, "offloading": offloading, "lmcache": lmcache}


@dataclass(frozen=True)
class Options:
    """As they are given on the command line."""

    python: str
    device: str
    systems: str | None
    contexts: str
    levels: str
    links: str | None
    rates: str
    shape: str
    repeats: int
    rounds: int
    decoded: int
    graphs: bool
    keep: Path | None
    seed: int


@dataclass
class Results:
    """What was measured so far, in a file after each figure."""

    task: Mapping[str, Any]
    facts: Mapping[str, str]
    file: Path | None
    console: Console
    rows: list[GpuRow] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return document(self.rows, self.runs, self.task, self.notes, self.facts)

    def add(self, found: Iterable[Any], to: list[Any]) -> None:
        for one in found:
            to.append(one)
            if self.file:
                write_json(self.file, self.document())

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """What one system cannot do must not cost the others' figures."""
        self.console.print(f"{what}: begins")
        try:
            measure()
        except KdnError as error:
            self.notes.append(f"{what} failed: {str(error)[-2000:]}")
            self.console.print(self.notes[-1], style="red", markup=False)


def run(given: Options, json_file: Path | None, plot_file: Path | None) -> None:
    console = Console(stderr=True)
    systems = options.words("systems", given.systems or ",".join(SYSTEMS), SYSTEMS + MORE_SYSTEMS)
    links = options.words("links", given.links or ",".join(LINKS), tuple(LINKS))
    rates = options.words("rates", given.rates, tuple(RATES))
    contexts = [int(one) for one in options.numbers("contexts", given.contexts, 256, 1 << 17)]
    levels = [int(one) for one in options.numbers("levels", given.levels, 2, 3)]
    options.words("shape", given.shape, tuple(SHAPES))
    options.device(given.device)
    need_vllm(given.python)
    with _folder(given.keep) as folder:
        shape, device = SHAPES[given.shape], torch.device(given.device)
        console.print("writing a checkpoint")
        model = write_checkpoint(folder / f"model-{given.shape}", shape, device, given.seed)
        task = Task(
            model, shape.vocabulary, tuple(c // 256 * 256 for c in contexts), tuple(levels),
            given.repeats, given.device, given.python, given.seed, given.graphs,
        )  # fmt: skip
        results = Results(_told(given, task), hardware(given.device), json_file, console)
        _measure_plain(task, systems, folder, shape.token_bytes, results)
        for rate in rates:
            wanted = [name for name in systems if name not in PLAIN]
            if rate != rates[0]:
                wanted = [name for name in wanted if name != "beside"]
            if wanted:
                measure = partial(_measure_kdn, task, rate, wanted, links, folder, given, results)
                results.attempt(f"kdn, {rate}", measure)
    found = results.document()
    if json_file:
        write_json(json_file, found)
    if plot_file:
        plot(plot_file, found)
    print_report(report_console(), found)


@contextmanager
def _folder(keep: Path | None) -> Any:
    """For the model, profiles and logs; a kept one spares the next run the making."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="kdn-bench-") as folder:
        yield Path(folder)


def _told(given: Options, task: Task) -> dict[str, Any]:
    return {
        "shape": given.shape, "contexts": task.contexts, "levels": task.levels,
        "repeats": task.repeats, "seed": task.seed, "decoded_tokens": given.decoded,
        "graphs": given.graphs,
        "token_values": SHAPES[given.shape].token_bytes // 2, "qualities": QUALITIES,
        "rates": {rate: RATES[rate].told for rate in RATES}, "bits": {},
    }  # fmt: skip


def _measure_plain(
    task: Task, systems: Sequence[str], folder: Path, token_bytes: int, results: Results
) -> None:
    for name in (name for name in systems if name in PLAIN):
        if name == "lmcache" and not has_package(task.python, "lmcache"):
            results.notes.append("LMCache is left out: it is not installed")
            continue
        system = PLAIN[name]()
        rows = plain_rows(task, system, folder, token_bytes, results.console)
        results.attempt(system.name, partial(results.add, rows, results.rows))


def _measure_kdn(
    task: Task,
    rate: str,
    wanted: Sequence[str],
    links: Sequence[str],
    folder: Path,
    given: Options,
    results: Results,
) -> None:
    console = results.console
    dtype = torch.bfloat16 if task.device.startswith("cuda") else torch.float32
    console.print(f"kdn, {rate}: naming the model, making a profile and streams")
    spec = spec_of_checkpoint(task.model, dtype)
    drawn: Drawn = draw(spec, rate, folder / "drawn", torch.device(task.device), task.seed)
    if task.device.startswith("cuda"):
        torch.cuda.empty_cache()  # else it would count as the engines'
    bits = " / ".join(f"{one:.3f}" for one in drawn.bits())
    results.notes.append(f"{rate}: {RATES[rate].told}; drawn here: {bits} bits a value")
    bench = KdnBench(task, drawn, rate, folder, console)
    if "kdn-host" in wanted or "beside" in wanted:
        measure = partial(_with_host, task, bench, wanted, given, results)
        results.attempt(f"kdn, host memory, {rate}", measure)
    if "kdn-node" in wanted:
        add = partial(results.add, bench.node_rows(links), results.rows)
        results.attempt(f"kdn, node, {rate}", add)
    if "kdn-node-fetcher" in wanted:
        rows = bench.node_rows(links, NODE_FETCHER, CONNECTIONS)
        add = partial(results.add, rows, results.rows)
        results.attempt(f"{NODE_FETCHER}, {rate}", add)


def _with_host(
    task: Task, bench: KdnBench, wanted: Sequence[str], given: Options, results: Results
) -> None:
    with bench.host_engine() as engine:
        if "kdn-host" in wanted:
            results.add(bench.host_rows(engine), results.rows)
        if "beside" in wanted:
            runs = beside_runs(task, bench, engine, given.rounds, given.decoded)
            results.attempt("requests beside loads", partial(results.add, runs, results.runs))
