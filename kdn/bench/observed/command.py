"""`kdn bench observed`: what metrics, the request log and traces cost, beside the same without.

Two nodes send at full speed in turns: one that nobody watches, and one that traces every request to
a collector and whose metrics are read every second. Then two clients, processes of their own, are
asked in turns for the first token after a document that they fetch each time: one without a request
log and traces, one with both, and both ends of it traced. Turns change their order, so that
whatever else this machine does meets both.

Counting itself cannot be turned off, so the node that nobody watches counts, too.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any
from urllib.request import urlopen

import typer
from rich.console import Console
from rich.table import Table

from kdn.bench import options
from kdn.bench.node_load import check_all, full_speed
from kdn.bench.node_servers import Server, make_objects, start_kdn
from kdn.bench.options import JsonFile
from kdn.bench.report import hardware, report_console, write_json
from kdn.bench.servers import free_port
from kdn.calibrate.corpus import default_texts
from kdn.errors import KdnError, UnsupportedError

MOST_COST = 0.02
SIZES_BYTES, SET_BYTES, WINDOW_S = (64 << 10, 1 << 20), 64 << 20, 0.5
SCRAPED_EVERY_S = 1.0
START_S, ANSWER_S, ARRIVE_S, STOP_S = 300.0, 120.0, 20.0, 10.0
CHARACTERS_PER_TOKEN = 4
NAME = "document"


@dataclass(frozen=True)
class Compared:
    """One thing, unwatched and watched. `cost`: the part by which it is slower when it is watched,
    the median over pairs of turns; a quarter of the pairs lies below `low`, a quarter above
    `high`."""

    what: str
    unwatched: float
    watched: float
    cost: float
    low: float
    high: float
    pairs: int


def run(
    repeats: Annotated[int, options.count(4, "Turns of each node.")] = 20,
    asks: Annotated[int, options.count(0, "Turns of each client; 0: nodes alone.")] = 20,
    context: Annotated[int, options.count(256, "About so many tokens of the document.")] = 3072,
    model: Annotated[str, typer.Option(help="smollm2, a local folder, or a hub name.")] = "smollm2",
    json_file: JsonFile = None,
) -> None:
    """What metrics, the request log and traces cost: a node's speed, and the first token."""
    if find_spec("opentelemetry.sdk") is None:
        raise UnsupportedError("traces need OpenTelemetry: pip install 'kdn[otel]'")
    told = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kdn-bench-") as folder, collector() as sink:
        rows = compare_nodes(Path(folder), sink, repeats, told)
        if asks:
            rows += compare_clients(Path(folder), sink, model, asks, context, told)
    results = {
        "rows": [asdict(row) for row in rows],
        "passes": {row.what: row.cost <= MOST_COST for row in rows},
        "hardware": hardware("cpu"),
    }
    if json_file:
        write_json(json_file, results)
    print_report(report_console(), rows)


def compared(what: str, pairs: Sequence[tuple[float, float]]) -> Compared:
    """Pairs of seconds, unwatched and watched."""
    costs = sorted(watched / unwatched - 1 for unwatched, watched in pairs)
    quarter = len(costs) // 4
    return Compared(
        what, median(one for one, _ in pairs), median(one for _, one in pairs),
        median(costs), costs[quarter], costs[-1 - quarter], len(costs),
    )  # fmt: skip


# traces


class Collector:
    """Where traces go."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def taken_bytes(self) -> int:
        with urlopen(self.url, timeout=5.0) as answer:
            return int(answer.read())

    def wait(self, num_bytes: int, limit_s: float) -> None:
        """Until so many have come."""
        give_up_s = time.monotonic() + limit_s
        while time.monotonic() < give_up_s:
            with suppress(OSError):
                if self.taken_bytes() >= num_bytes:
                    return
            time.sleep(0.05)
        raise KdnError(f"{num_bytes} bytes of traces did not come within {limit_s:g} s")


@contextmanager
def collector() -> Iterator[Collector]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "kdn.bench.observed.sink", str(port)])
    found = Collector(port)
    try:
        found.wait(0, START_S)
        yield found
    finally:
        _stop(process)


@contextmanager
def _exporting(sink: Collector) -> Iterator[None]:
    """Processes that are begun meanwhile send their traces there."""
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    before = os.environ.get(name)
    os.environ[name] = sink.url
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def _two_nodes(folder: Path, sink: Collector) -> Iterator[tuple[Server, Server]]:
    """One that nobody watches, one that is watched."""
    with ExitStack() as stack:
        plain = stack.enter_context(start_kdn(folder / "plain"))
        with _exporting(sink):
            watched = stack.enter_context(start_kdn(folder / "watched", {"tracing": True}))
        stack.enter_context(_scraped(watched))
        yield plain, watched


@contextmanager
def _scraped(server: Server) -> Iterator[None]:
    """Its metrics are read every second."""
    over = threading.Event()
    host, port = server.address

    def scrape() -> None:
        while not over.wait(SCRAPED_EVERY_S):
            with suppress(OSError), urlopen(f"http://{host}:{port}/metrics", timeout=5.0) as page:
                page.read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(STOP_S)


# nodes


def compare_nodes(folder: Path, sink: Collector, repeats: int, told: Console) -> list[Compared]:
    """At full speed, batches of objects of several sizes: as `kdn bench node` measures."""
    sets = {size: make_objects(size, SET_BYTES // size, 0) for size in SIZES_BYTES}
    pairs: list[tuple[float, float]] = []
    with _two_nodes(folder / "nodes", sink) as both:
        for objects in sets.values():
            for server in both:
                server.put(objects)
                check_all(server, objects)
        before = sink.taken_bytes()
        for number in range(repeats):
            told.print(f"nodes at full speed, {number + 1} of {repeats}")
            pairs.append(_pair(both, sets, is_swapped=number % 2 > 0))
        _need_traces(sink, before)
    return [compared("a node at full speed, s/GB", pairs)]


def _pair(
    both: Sequence[Server], sets: Mapping[int, Mapping[str, bytes]], *, is_swapped: bool
) -> tuple[float, float]:
    """Seconds per 10^9 bytes of each, over all sizes."""
    took: dict[Server, list[float]] = {server: [] for server in both}
    for objects in sets.values():
        for server in both[::-1] if is_swapped else both:
            took[server].append(1e9 / full_speed(server, objects, WINDOW_S).bytes_per_s)
    plain, watched = (geometric_mean(took[server]) for server in both)
    return plain, watched


def _need_traces(sink: Collector, before: int) -> None:
    """They are sent every few seconds."""
    sink.wait(before + 1, ARRIVE_S)


# clients


def compare_clients(
    folder: Path, sink: Collector, model: str, asks: int, context: int, told: Console
) -> list[Compared]:
    text = default_texts()[0].content[: CHARACTERS_PER_TOKEN * context]
    pairs: list[tuple[float, float]] = []
    with _two_nodes(folder / "clients", sink) as nodes, ExitStack() as stack:
        clients = []
        for node, watched in zip(nodes, (False, True), strict=True):
            told.print("a client learns the document")
            clients.append(stack.enter_context(_client(node, model, text, sink, watched=watched)))
        for client in clients:
            client.ask()  # what is made on first use is made
        before = sink.taken_bytes()
        for number in range(asks):
            told.print(f"first tokens, {number + 1} of {asks}")
            order = clients[::-1] if number % 2 else clients
            took = {id(client): client.ask() for client in order}
            plain, watched_s = (took[id(client)] for client in clients)
            pairs.append((plain, watched_s))
        _need_traces(sink, before)
    return [compared(f"the first token after about {context} tokens, s", pairs)]


class _Client:
    """One process, asked over pipes. Every wait has a deadline."""

    def __init__(self, process: subprocess.Popen[str], settings: Mapping[str, Any]) -> None:
        self._process = process
        self._call(settings, START_S)

    def ask(self) -> float:
        """Seconds to the first token."""
        told = self._call({}, ANSWER_S)
        if not told["fetched_bytes"]:
            raise KdnError("a client answered without fetching anything")
        return float(told["seconds"])

    def _call(self, what: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        give_up_s = time.monotonic() + limit_s
        while time.monotonic() < give_up_s and self._process.poll() is None:
            if select.select([self._process.stdout], [], [], 1.0)[0]:
                found: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
                if found:
                    return found
        raise KdnError(f"a client did not answer within {limit_s:g} s")


@contextmanager
def _client(
    node: Server, model: str, text: str, sink: Collector, *, watched: bool
) -> Iterator[_Client]:
    host, port = node.address
    settings = {
        "url": f"http://{host}:{port}", "model": model, "text": text, "name": NAME,
        "watched": watched,
    }  # fmt: skip
    with _exporting(sink):
        process = subprocess.Popen(
            [sys.executable, "-m", "kdn.bench.observed.asker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        yield _Client(process, settings)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def print_report(console: Console, rows: Sequence[Compared]) -> None:
    table = Table("", "unwatched", "watched", "costs", "half of the pairs", "pairs")
    for row in rows:
        table.add_row(
            row.what, f"{row.unwatched:.3f}", f"{row.watched:.3f}", f"{row.cost:+.1%}",
            f"{row.low:+.1%} to {row.high:+.1%}", str(row.pairs),
        )  # fmt: skip
    console.print(table)
