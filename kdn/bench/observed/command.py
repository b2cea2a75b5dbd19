"""`kdn bench observed`: what metrics, the request log and traces cost, beside the same without.

Two nodes send at full speed in turns: one that nobody watches, and one that traces to a collector
(as a node does by default: all requests of clients that trace, a share of the others) and whose
metrics are read in its turns. Then two clients, processes of their own, are asked in turns for the
first token after a document that they fetch each time: one without a request log and traces, one
with both, each from one of the nodes. The order of turns changes, so that
whatever else this machine does meets both. What a watcher should see is checked: a run in which
nothing was traced, read or logged fails.

Counting itself cannot be turned off, so the node that nobody watches counts, too. Not measured:
many small requests, of each of which a trace costs a larger part (docs/observability.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any
from urllib.request import urlopen

import typer
from rich.console import Console

from kdn.bench import options
from kdn.bench.node_load import check_all, full_speed
from kdn.bench.node_servers import Server, make_objects, start_kdn
from kdn.bench.options import JsonFile
from kdn.bench.report import hardware, print_end, report_console, table_of, write_json
from kdn.bench.servers import free_port
from kdn.bench.vllm_engine import EngineProcess, start_engine
from kdn.calibrate.corpus import default_texts
from kdn.errors import KdnError
from kdn.tracing import check_installed

MOST_COST = 0.02
SIZES_BYTES, SET_BYTES, WINDOW_S = (64 << 10, 1 << 20), 64 << 20, 2.0
SCRAPED_EVERY_S = 5.0
"""Of the time that a node is watched. Prometheus takes a minute unless told otherwise."""
EXPORTED_EVERY_MS = 1000
"""Instead of five seconds: what a turn records is sent in that turn, mostly."""
START_S, ARRIVE_S, STOP_S, QUIET_S = 20.0, 20.0, 10.0, 2.5
TRACED_BYTES = 1_000
"""The least that the traces of a node take in all its turns, and those of a client for each ask."""
CHARACTERS_PER_TOKEN = 4
NODE, CLIENT, NAME = "node", "client", "document"
ASKER = Path(__file__).with_name("asker.py")


@dataclass(frozen=True)
class Compared:
    """Seconds of one thing, unwatched and watched. `cost`: the part by which it is slower when it
    is watched, the median over pairs of turns; a quarter of the pairs lies below `low`, a quarter
    above `high`."""

    what: str
    unwatched: float
    watched: float
    cost: float
    low: float
    high: float
    pairs: int


def run(
    repeats: Annotated[int, options.count(4, "Turns of each node.")] = 16,
    asks: Annotated[int, options.count(0, "Turns of each client; 0: nodes alone.")] = 20,
    context: Annotated[int, options.count(256, "About so many tokens of the document.")] = 3072,
    model: Annotated[str, typer.Option(help="smollm2, a local folder, or a hub name.")] = "smollm2",
    json_file: JsonFile = None,
) -> None:
    """What metrics, the request log and traces cost: a node's speed, and the first token."""
    check_installed()
    told = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kdn-bench-") as folder, collector() as sink:
        rows = compare_nodes(Path(folder), sink, repeats, told)
        if asks:
            rows += compare_clients(Path(folder), sink, model, asks, context, told)
    results = {
        "rows": [asdict(row) for row in rows],
        "passes": {f"{row.what}: at most {MOST_COST:.0%}": row.cost <= MOST_COST for row in rows},
        "notes": [],
        "hardware": hardware("cpu"),
    }
    if json_file:
        write_json(json_file, results)
    print_report(report_console(), rows, results)


def compared(what: str, pairs: Sequence[tuple[float, float]]) -> Compared:
    """Pairs of seconds, unwatched and watched."""
    costs = sorted(watched / unwatched - 1 for unwatched, watched in pairs)
    quarter = len(costs) // 4
    return Compared(
        what, median(one for one, _ in pairs), median(one for _, one in pairs),
        median(costs), costs[quarter], costs[-1 - quarter], len(costs),
    )  # fmt: skip


# those who watch


class Collector:
    """Where traces go."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def taken_bytes(self, sender: str) -> int:
        with urlopen(f"{self.url}/{sender}", timeout=5.0) as answer:
            return int(answer.read())

    def wait(self, sender: str, num_bytes: int, limit_s: float = ARRIVE_S) -> None:
        """Until so many have come of this one."""
        give_up_s, found = time.monotonic() + limit_s, 0
        while time.monotonic() < give_up_s:
            with suppress(OSError):
                if (found := self.taken_bytes(sender)) >= num_bytes:
                    return
            time.sleep(0.05)
        raise KdnError(
            f"expected {num_bytes:,} bytes of traces of the {sender}, found {found:,} after "
            f"{limit_s:g} s"
        )


@contextmanager
def collector() -> Iterator[Collector]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "kdn.bench.observed.sink", str(port)])
    found = Collector(port)
    try:
        found.wait(NODE, 0, START_S)
        yield found
    finally:
        process.kill()
        process.wait()


def _exporting(sink: Collector, sender: str) -> dict[str, str]:
    """The environment of a process that sends its traces there."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{sink.url}/{sender}",
        "OTEL_BSP_SCHEDULE_DELAY": str(EXPORTED_EVERY_MS),
    }


class Scraper:
    """Reads a node's metrics every few seconds of the time in which it is told to."""

    def __init__(self, server: Server) -> None:
        host, port = server.address
        self._url = f"http://{host}:{port}/metrics"
        self._left_s = 0.0  # until the next time
        self.times = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._read, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(STOP_S)

    def _read(self, over: threading.Event) -> None:
        while True:
            began_s = time.monotonic()
            is_over = over.wait(self._left_s)
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
            if is_over:
                return
            with suppress(OSError), urlopen(self._url, timeout=5.0) as page:
                self.times += bool(page.read())
            self._left_s = SCRAPED_EVERY_S


@contextmanager
def _two_nodes(folder: Path, sink: Collector) -> Iterator[tuple[list[Server], Scraper]]:
    """One that nobody watches, one that is watched, and who reads its metrics."""
    with ExitStack() as stack:
        plain = stack.enter_context(start_kdn(folder / "plain"))
        with _environ(_exporting(sink, NODE)):
            watched = stack.enter_context(start_kdn(folder / "watched", {"tracing": True}))
        yield [plain, watched], Scraper(watched)


@contextmanager
def _environ(more: Mapping[str, str]) -> Iterator[None]:
    """Of processes that begin meanwhile."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# nodes


def compare_nodes(folder: Path, sink: Collector, repeats: int, told: Console) -> list[Compared]:
    """At full speed, batches of objects of several sizes: as `kdn bench node` measures."""
    sets = [make_objects(size, SET_BYTES // size, 0) for size in SIZES_BYTES]
    pairs: list[tuple[float, float]] = []
    with _two_nodes(folder / "nodes", sink) as (both, scraper):
        for objects in sets:
            for server in both:
                server.put(objects)
                check_all(server, objects)
        time.sleep(QUIET_S)  # traces of that are sent
        before = sink.taken_bytes(NODE)
        for number in range(repeats):
            told.print(f"nodes at full speed, {number + 1} of {repeats}")
            took: list[list[float]] = [[], []]
            for objects in sets:
                for which in _order(number):
                    with scraper.reading() if which else ExitStack():
                        speed = full_speed(both[which], objects, WINDOW_S)
                    took[which].append(1e9 / speed.bytes_per_s)
            pairs.append((geometric_mean(took[0]), geometric_mean(took[1])))
        sink.wait(NODE, before + TRACED_BYTES)
        _need_scrapes(scraper)
    return [compared("a node at full speed, s/GB", pairs)]


def _order(number: int) -> tuple[int, int]:
    return (1, 0) if number % 2 else (0, 1)


def _need_scrapes(scraper: Scraper) -> None:
    if not scraper.times:
        raise KdnError("the node's metrics could not be read")


# clients


def compare_clients(
    folder: Path, sink: Collector, model: str, asks: int, context: int, told: Console
) -> list[Compared]:
    text = default_texts()[0].content[: CHARACTERS_PER_TOKEN * context]
    pairs: list[tuple[float, float]] = []
    with _two_nodes(folder / "clients", sink) as (nodes, scraper), ExitStack() as stack:
        clients = []
        for which, node in enumerate(nodes):
            told.print("a client learns the document")
            settings = {"model": model, "text": text, "name": NAME, "watched": bool(which)}
            more = _exporting(sink, CLIENT) if which else {}
            log = folder / f"client-{which}.log"
            clients.append(stack.enter_context(_client(node, settings, log, more)))
        for client in clients:
            _ask(client)  # what is made on first use is made
        time.sleep(QUIET_S)
        before = sink.taken_bytes(CLIENT)
        for number in range(asks):
            told.print(f"first tokens, {number + 1} of {asks}")
            took_s = [0.0, 0.0]
            for which in _order(number):
                with scraper.reading() if which else ExitStack():
                    took_s[which] = _ask(clients[which], is_logged=bool(which))
            pairs.append((took_s[0], took_s[1]))
        sink.wait(CLIENT, before + asks * TRACED_BYTES)
        _need_scrapes(scraper)
    return [compared(f"the first token after about {context:,} tokens, s", pairs)]


def _ask(client: EngineProcess, *, is_logged: bool = False) -> float:
    """Seconds to the first token."""
    told = client.call({})
    if not told["fetched_bytes"]:
        raise KdnError("a client answered without fetching anything")
    if is_logged and not told["logged_bytes"]:  # negative: the log has begun anew
        raise KdnError("a client logged nothing")
    return float(told["seconds"])


@contextmanager
def _client(
    node: Server, settings: Mapping[str, Any], log: Path, more: Mapping[str, str]
) -> Iterator[EngineProcess]:
    host, port = node.address
    own = {name: value for name, value in os.environ.items() if _is_passed_on(name)}
    asked = {**settings, "url": f"http://{host}:{port}"}
    with start_engine(sys.executable, asked, log, {**own, **more}, ASKER, "a client") as client:
        yield client


def _is_passed_on(name: str) -> bool:
    """No settings of the user's own, but where the models are."""
    return name == "KDN_CACHE" or not name.startswith("KDN_")


def print_report(console: Console, rows: Sequence[Compared], results: Mapping[str, Any]) -> None:
    headings = ("", "unwatched", "watched", "costs", "half of the pairs", "pairs")
    table = table_of("Watched beside unwatched", headings)
    for row in rows:
        table.add_row(
            row.what, f"{row.unwatched:.3f}", f"{row.watched:.3f}", f"{row.cost:+.1%}",
            f"{row.low:+.1%} to {row.high:+.1%}", str(row.pairs),
        )  # fmt: skip
    console.print(table)
    print_end(console, results)
