"""What is measured in each engine, and the rows that come of it.

An engine starts once for each system and serves all lengths and links: a node that is held to
another rate takes the place of the one before, at the same address.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from kdn.bench.node_servers import start_kdn
from kdn.bench.servers import free_port
from kdn.bench.vllm_engine import EngineError, EngineProcess, start_engine
from kdn.bench.vllm_gpu.streams import QUALITIES, Drawn, put_all
from kdn.bench.vllm_gpu.systems import HOST, LINKS, LOOPBACK, NODE, System, environ_of, kdn
from kdn.session.host_memory import SHARED_MEMORY

WORKER = Path(__file__).with_name("worker.py")
QUESTION_TOKENS = 16
"""After a context: the engine computes these itself."""
FILL_TOKENS = 4
BESIDE_TOKENS = 8192
"""Of a context that is loaded beside requests that decode."""
NODE_SETTINGS = {"memory_bytes": 8 << 30}
WORKERS = 4
"""Of a node without a limit: one process sends about 2 GB/s."""
CELL_S = 6.0
"""One figure is repeated no longer than this, but at least twice."""
KEPT_S = 20.0
"""Until what was loaded once is in the host's memory, or a restarted node is found again."""


@dataclass(frozen=True)
class Task:
    model: Path
    vocabulary: int
    contexts: tuple[int, ...]
    levels: tuple[int, ...]
    repeats: int
    device: str
    python: str
    seed: int
    graphs: bool = False

    @property
    def max_tokens(self) -> int:
        """Of a prompt and what is made after it."""
        return max(*self.contexts, BESIDE_TOKENS) + 2048

    def prompt(self, context: int, number: int = 0) -> list[int]:
        """A context and a question; another one for each number."""
        rng = np.random.default_rng([self.seed, context, number])
        found: list[int] = rng.integers(3, self.vocabulary, context + QUESTION_TOKENS).tolist()
        return found


class GpuRow(NamedTuple):
    """One system, link and number of levels, at one length."""

    system: str
    context: int
    answers: list[dict[str, Any]]
    """Repeats: ttft_s, hit_tokens, and what kdn counted meanwhile."""
    rate: str = ""
    link: str = LOOPBACK
    levels: int = 0
    stored_bytes: int = 0
    """Of this context, where it comes from; 0: not known."""
    engine: dict[str, Any] | None = None
    """What the engine said when it was ready, and its memory on the GPU."""


@contextmanager
def engine_of(task: Task, system: System, folder: Path) -> Iterator[EngineProcess]:
    log = folder / f"{system.name.replace(' ', '-').replace(',', '')}.log"
    settings = system.settings(task.model, task.max_tokens, task.device, task.graphs)
    environ = environ_of(system, len(os.sched_getaffinity(0)))
    with start_engine(task.python, settings, log, environ, WORKER) as engine:
        yield engine


def ask(
    engine: EngineProcess, tokens: Sequence[int], repeats: int, levels: int = 0, **more: Any
) -> list[dict[str, Any]]:
    """So many answers; `levels`: with what kdn is to load, and nothing published."""
    own = {"quality": QUALITIES[levels], "publish": False} if levels else None
    question = {"do": "ask", "tokens": list(tokens), "repeats": repeats, "kdn": own}
    found: list[dict[str, Any]] = engine.call(question | {"limit_s": CELL_S} | more)["answers"]
    return found


def told(engine: EngineProcess) -> dict[str, Any]:
    return {**engine.facts, **engine.call({"do": "memory"})}


def plain_rows(
    task: Task, system: System, folder: Path, token_bytes: int, console: Console
) -> Iterator[GpuRow]:
    """Of a system that keeps its caches itself: each prompt is read once, which fills it (and warms
    the engine up), and then asked for again."""
    with engine_of(task, system, folder) as engine:
        for context in task.contexts:
            prompt = task.prompt(context)
            ask(engine, prompt, 1, max_tokens=FILL_TOKENS)
            ask(engine, prompt, 1)
            answers = ask(engine, prompt, task.repeats)
            stored = context * token_bytes if system.transfer else 0
            row = GpuRow(system.name, context, answers, stored_bytes=stored, engine=told(engine))
            tell(console, row)
            yield row


def tell(console: Console, row: GpuRow) -> None:
    times = " ".join(f"{1000 * one['ttft_s']:.0f}" for one in row.answers)
    what = [row.system, row.rate, row.link, f"{row.levels} levels" if row.levels else ""]
    console.print(
        f"{', '.join(filter(None, what))}, {row.context}: {times} ms, "
        f"{row.answers[-1]['hit_tokens']} tokens known"
    )


class KdnBench:
    """kdn at one rate: a node with everything in it, over which engines are asked."""

    def __init__(self, task: Task, drawn: Drawn, rate: str, folder: Path, console: Console) -> None:
        self._task, self._drawn, self._rate = task, drawn, rate
        self._folder, self._console = folder / rate, console
        self._folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        self._stored: dict[tuple[int, int], int] = {}
        """Bytes at the node by length and number of the prompt."""
        self._host: Path | None = None  # the host's memory, while there is one

    @contextmanager
    def node(self, link: str = LOOPBACK) -> Iterator[None]:
        """Always at the same address."""
        limit = LINKS[link]
        settings = NODE_SETTINGS | ({"egress_bits_per_s": limit} if limit else {"workers": WORKERS})
        with start_kdn(self._folder / "node", settings, port=self._port):
            yield

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def fill(self, numbers: Mapping[int, Sequence[int]]) -> None:
        """Length to the numbers of its prompts that are to be found at the node."""
        wanted = [(context, one) for context, every in numbers.items() for one in every]
        wanted = [one for one in wanted if one not in self._stored]
        sizes = put_all(self.url, self._drawn, [self._task.prompt(*one) for one in wanted])
        self._stored |= dict(zip(wanted, sizes, strict=True))

    def node_rows(
        self, links: Sequence[str], name: str = NODE, connections: int | None = None
    ) -> Iterator[GpuRow]:
        """From a node, over links; this host keeps nothing."""
        task = self._task
        with ExitStack() as stack:
            with self.node():
                self.fill(dict.fromkeys(task.contexts, (0,)))
                system = kdn(name, self.url, self._drawn, None, connections)
                engine = stack.enter_context(engine_of(task, system, self._folder))
            for link in links:
                with self.node(link):
                    self._found_again(engine)
                    yield from self._rows(engine, name, link)

    def _found_again(self, engine: EngineProcess) -> None:
        """A node that was away is not asked for some seconds."""
        context = min(self._task.contexts)
        ask(engine, self._task.prompt(context), 1, 3)  # compiles what it needs, if it is found
        until_s = time.monotonic() + KEPT_S
        while not ask(engine, self._task.prompt(context), 1, 3)[0]["hit_tokens"]:
            if time.monotonic() > until_s:
                raise EngineError("kdn finds nothing at its node")
            time.sleep(0.5)

    def _rows(self, engine: EngineProcess, name: str, link: str = LOOPBACK) -> Iterator[GpuRow]:
        for levels in self._task.levels:
            for context in self._task.contexts:
                prompt = self._task.prompt(context)
                ask(engine, prompt, 1, levels)  # from the node's disk into its memory
                answers = ask(engine, prompt, self._task.repeats, levels)
                row = GpuRow(
                    name, context, answers, self._rate, link, levels,
                    self._stored[context, 0], told(engine),
                )  # fmt: skip
                tell(self._console, row)
                yield row

    @contextmanager
    def host_engine(self) -> Iterator[EngineProcess]:
        """Beside a node on loopback, with host memory, which is empty."""
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with (
            tempfile.TemporaryDirectory(dir=shared, prefix="kdn-bench-") as host,
            self.node(),
        ):
            contexts = self._task.contexts
            self.fill(dict.fromkeys(contexts, self._task.levels))
            self._host = Path(host)
            system = kdn(HOST, self.url, self._drawn, self._host)
            with engine_of(self._task, system, self._folder) as engine:
                yield engine

    def host_rows(self, engine: EngineProcess) -> Iterator[GpuRow]:
        """Prompts that came from the node once, with so many levels, and are on the host since."""
        for levels in self._task.levels:
            for context in self._task.contexts:
                prompt = self._task.prompt(context, levels)
                before = self._held_bytes()
                self.kept(engine, prompt, context, levels)
                held = self._held_bytes() - before
                answers = ask(engine, prompt, self._task.repeats, levels)
                row = GpuRow(
                    HOST, context, answers, self._rate, LOOPBACK, levels, held, told(engine)
                )
                tell(self._console, row)
                yield row

    def _held_bytes(self) -> int:
        """Of all files in the host's memory."""
        assert self._host is not None
        return sum(path.stat().st_size for path in self._host.rglob("*") if path.is_file())

    def kept(self, engine: EngineProcess, prompt: Sequence[int], context: int, levels: int) -> None:
        """Ask until all of it comes from the host's memory."""
        ask(engine, prompt, 1, levels)  # the very first compiles what it needs
        until_s = time.monotonic() + KEPT_S
        while time.monotonic() < until_s:
            [answer] = ask(engine, prompt, 1, levels)
            if answer["counts"].get("host_tokens", 0) >= context:
                return
            time.sleep(0.3)
        self._console.print(f"{context} tokens are not in the host's memory after {KEPT_S:.0f} s")
