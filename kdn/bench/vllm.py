"""`kdn bench vllm`: what a fresh vLLM engine waits for its first token, by where caches come from.

For each system one engine reads the documents and an unrelated warm-up; when its store has stopped
growing the engine ends. For each link another engine then starts, is asked for the warm-up, which
exercises all that happens on first use, and a question after each document. All engines are real,
on the CPU, one at a time, in float32; rivals store what the engine holds, so their bytes are also
given as 16-bit equivalents. With `--device cuda` it is another benchmark: `vllm_gpu/`.

Not measured: several requests at once, a real network (stores run on the same machine).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import xxhash
from rich.console import Console

from kdn.bench import options
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.report import hardware, report_console, write_json
from kdn.bench.vllm_engine import (
    EngineError,
    EngineProcess,
    engine_environ,
    has_package,
    need_vllm,
    start_engine,
)
from kdn.bench.vllm_report import VllmRow, document, plot, print_report, read_rows
from kdn.bench.vllm_systems import (
    LINKS,
    LOOPBACK,
    Example,
    KdnSystem,
    LMCache,
    NoCache,
    Route,
    System,
)
from kdn.calibrate.corpus import (
    Text,
    begun,
    default_texts,
    load_text,
    prompt_head,
    window_starts,
)
from kdn.defaults import ENGINE_QUALITY
from kdn.errors import FormatError, ModelUnavailableError, UnsupportedError
from kdn.session.quality import enough_kld

INSTALL_LMCACHE = "pip install --no-deps lmcache==0.5.6, and the packages it asks for"
SYSTEMS = ("none", "example", "lmcache", "kdn", "kdn-decoding")
QUESTION = "\n\nQuestion: What is the most important statement of this text?\nAnswer:"
WARM_UP = "The quick brown fox jumps over the lazy dog. "
SETTLED_S = 3.0
SETTLE_LIMIT_S = 180.0


@dataclass(frozen=True)
class Task:
    """What every engine is asked."""

    model: str
    documents: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    warm_up: tuple[int, ...]
    answer_tokens: int

    @property
    def max_tokens(self) -> int:
        longest = max(len(one) for one in self.documents)
        return -(-(longest + len(self.question) + self.answer_tokens) // 256) * 256

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(repr(self).encode())


def run(
    python: Annotated[str, typer.Option(help="The interpreter that has vLLM.")] = sys.executable,
    lmcache_python: Annotated[
        str | None, typer.Option(help="One with vLLM and LMCache; by default the same.")
    ] = None,
    systems: Annotated[
        str | None, typer.Option(help="Comma-separated; by default all that the device has.")
    ] = None,
    links: Annotated[str | None, typer.Option(help="Comma-separated; by default all.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: then with the options after --seed.")
    ] = "cpu",
    model: Annotated[str, typer.Option(help="smollm2, or a local folder.")] = "smollm2",
    text: Annotated[Path | None, options.files("Instead of Python's manual.")] = None,
    context: Annotated[int, options.count(256, "Tokens of a document.")] = 3500,
    documents: Annotated[int, options.count(1, "How many.")] = 3,
    answer: Annotated[int, options.count(1, "Tokens of each answer.")] = 16,
    quality: Annotated[
        float | None, typer.Option(help="Divergence good enough for kdn, in nats.")
    ] = None,
    stored_quality: Annotated[
        float | None, typer.Option(help="That kdn stores levels for; by default all of them.")
    ] = None,
    add: Annotated[
        list[Path] | None, options.files("JSON of earlier runs of the same task to tell with.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for logs and stores; those that an earlier run filled are used."),
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    seed: Annotated[int, options.seed("Chooses the documents.")] = 0,
    contexts: Annotated[str, typer.Option(help="cuda: tokens, comma-separated.")] = (
        "2048,8192,32768"
    ),
    levels: Annotated[str, typer.Option(help="cuda: of kdn's streams, comma-separated.")] = "3,2",
    rates: Annotated[str, typer.Option(help="cuda: as of kdn bench gpu.")] = "grouped,pairs",
    shape: Annotated[str, typer.Option(help="cuda: of the model, 8b or tiny.")] = "8b",
    repeats: Annotated[int, options.count(2, "cuda: of each figure.")] = 5,
    rounds: Annotated[int, options.count(1, "cuda: of requests that decode beside others.")] = 2,
    decoded: Annotated[int, options.count(16, "cuda: tokens that each of these makes.")] = 320,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="cuda: vLLM replays CUDA graphs in short steps.")
    ] = False,
) -> None:
    """Time to first token of a fresh vLLM engine: no cache, ExampleConnector, LMCache and kdn."""
    # Told to stop, engines and servers must be stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if device != "cpu":
        from kdn.bench.vllm_gpu.command import Options
        from kdn.bench.vllm_gpu.command import run as run_on_gpu

        given = Options(
            _found(python), device, systems, contexts, levels, links, rates, shape, repeats, rounds,
            decoded, graphs, keep, seed,
        )  # fmt: skip
        run_on_gpu(given, json_file, plot_file)
        return
    console = Console(stderr=True)
    qualities = {"quality": quality, "stored_quality": stored_quality}
    own = {name: enough_kld(one) for name, one in qualities.items() if one is not None}
    wanted = own.get("quality", enough_kld(ENGINE_QUALITY))
    if own.get("stored_quality", 0.0) > wanted:
        raise UnsupportedError(f"stored-quality: expected no coarser than --quality, {wanted:g}")
    chosen_links = options.words("links", links or ",".join(LINKS), tuple(LINKS))
    names = options.words("systems", systems or ",".join(SYSTEMS), SYSTEMS)
    chosen, notes = choose(names, _found(python), _found(lmcache_python or python), own)
    task, told = make_task(model, text, context, documents, answer, seed)
    rows = read_rows(add or [], told)
    facts = hardware("cpu") | {f"kdn's {name}": f"{one:g}" for name, one in own.items()}
    with tempfile.TemporaryDirectory(prefix="kdn-bench-") as work:
        folder = keep or Path(work)
        for row in measure(task, chosen, chosen_links, folder.resolve(), console):
            rows.append(row)
            if json_file:  # after each: the whole takes many minutes
                write_json(json_file, document(rows, told, notes, facts))
    results = document(rows, told, notes, facts)
    if json_file:
        write_json(json_file, results)
    if plot_file:
        plot(plot_file, results)
    print_report(report_console(), results)


def _found(python: str) -> str:
    """Servers run in folders of their own, so the path must not be relative."""
    path = shutil.which(python)
    if path is None:
        raise UnsupportedError(f"expected an interpreter, found {python!r}")
    return os.path.abspath(path)


def choose(
    names: Sequence[str], python: str, lmcache_python: str, own: Mapping[str, float]
) -> tuple[list[System], list[str]]:
    """The systems that can run, and why others cannot. `own`: more of the connector's settings."""
    need_vllm(python)
    extra = tuple(own.items())
    known: dict[str, System] = {
        "none": NoCache(python),
        "example": Example(python),
        "lmcache": LMCache(lmcache_python),
        "kdn": KdnSystem(python, extra=extra),
        "kdn-decoding": KdnSystem(
            python, name="kdn, decoding", links=(LOOPBACK,), shares_memory=False, extra=extra
        ),
    }
    notes = []
    if "lmcache" in names:
        if not has_package(lmcache_python, "lmcache"):
            notes.append(f"LMCache is left out; to compare: {INSTALL_LMCACHE}")
            names = [name for name in names if name != "lmcache"]
        else:
            need_vllm(lmcache_python)
            if known["lmcache"].links == (LOOPBACK,):
                notes.append("LMCache over slow links is left out: it needs redis-server")
    return [known[name] for name in names], notes


def make_task(
    model: str, path: Path | None, context: int, documents: int, answer: int, seed: int
) -> tuple[Task, dict[str, Any]]:
    """The task, and how it is told: runs of equal tasks may be put together."""
    from transformers import AutoTokenizer

    from kdn.engines.models import SMOLLM2, smollm2_folder

    folder = smollm2_folder() if model == SMOLLM2 else Path(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"expected {SMOLLM2} or a folder: {model!r}") from error
    source = load_text(path) if path else default_texts()[0]
    ids, head = source.tokens(tokenizer), prompt_head(tokenizer)
    body = context - len(head)
    starts = window_starts(len(ids), body, documents, seed)
    if len(starts) < documents:
        raise FormatError(f"{source.name}: too short for {documents} documents of {context} tokens")
    task = Task(
        str(folder),
        tuple(tuple(begun(head, ids[at : at + body]).tolist()) for at in starts),
        tuple(Text("", QUESTION).tokens(tokenizer).tolist()),
        tuple(Text("", WARM_UP * 60).tokens(tokenizer).tolist()),
        answer,
    )
    told = {"model": model, "text": source.name, "context": context, "documents": documents}
    return task, told | {"answer_tokens": answer, "seed": seed}


def measure(
    task: Task, systems: Sequence[System], links: Sequence[str], folder: Path, console: Console
) -> Iterator[VllmRow]:
    for system in systems:
        place = folder / system.name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        with system.open(place) as store:
            stored_bytes = 0
            if not isinstance(system, NoCache):
                with store.route(LOOPBACK) as route:
                    stored_bytes = learn_once(task, system, route, place, console)
            for link in (link for link in links if link in system.links):
                console.print(f"{system.name}, {link}: a fresh engine")
                with store.route(link) as route:
                    row = ask_all(task, system, link, route, place, console)
                yield row._replace(stored_bytes=stored_bytes // len(task.documents))


def _engine(
    task: Task, system: System, route: Route, log: Path
) -> AbstractContextManager[EngineProcess]:
    settings = {"model": task.model, "max_tokens": task.max_tokens, "transfer": route.transfer}
    threads = len(os.sched_getaffinity(0))
    return start_engine(system.python, settings, log, engine_environ(threads))


def learn_once(task: Task, system: System, route: Route, place: Path, console: Console) -> int:
    """`learn`, unless an earlier run has, of the same task, and what it stored outlives it."""
    note = place / f"stored-{task.digest}"
    if system.lasts and note.exists():
        return int(note.read_text())
    console.print(f"{system.name}: an engine reads {len(task.documents)} documents")
    stored_bytes = learn(task, system, route, place, console)
    note.write_text(str(stored_bytes))
    return stored_bytes


def learn(task: Task, system: System, route: Route, place: Path, console: Console) -> int:
    """Have an engine read everything; the bytes that its store then holds."""
    with _engine(task, system, route, place / "writer.log") as engine:
        for tokens in task.documents:
            told = engine.ask(tokens + task.question * isinstance(system, Example), 1)
            console.print(f"  read {len(tokens)} tokens in {told.ttft_s:.2f} s")
        stored_bytes = settle(route.stored_bytes)
        engine.ask(task.warm_up, 1)
        settle(route.stored_bytes, more_than=stored_bytes)
        return stored_bytes


def settle(
    stored_bytes: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    more_than: int = 0,
) -> int:
    """Wait until a store has stopped growing: publishing goes on behind the answers."""
    started_s = since_s = clock()
    size = 0
    while clock() - started_s < SETTLE_LIMIT_S:
        found = stored_bytes()
        if found != size:
            size, since_s = found, clock()
        elif size > more_than and clock() - since_s > SETTLED_S:
            return size
        sleep(0.2)
    raise EngineError(
        f"after {SETTLE_LIMIT_S:.0f} s {size} bytes are stored and it has not come to rest: "
        "the connector found no support, or its store failed"
    )


def ask_all(
    task: Task, system: System, link: str, route: Route, place: Path, console: Console
) -> VllmRow:
    """One fresh engine's answers over one link."""
    answers, moved = [], []
    log = place / f"reader-{link.replace(' ', '-').replace('/', '-')}.log"
    with _engine(task, system, route, log) as engine:
        first = engine.ask(task.warm_up, task.answer_tokens)
        for tokens in task.documents:
            before = route.moved_bytes() if route.moved_bytes else 0
            told = engine.ask(tokens + task.question, task.answer_tokens)
            answers.append(asdict(told))
            if route.moved_bytes:
                moved.append(route.moved_bytes() - before)
            console.print(f"  {told.ttft_s:.3f} s, {told.hit_tokens} tokens known")
        facts = engine.facts
    return VllmRow(system.name, link, answers, moved, 0, facts["vllm"], asdict(first))
