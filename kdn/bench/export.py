"""`kdn bench export`: a delivery from plain nginx beside one from a node, over the same links.

A model reads a document; its chunks are published into a folder. A node serves that folder, nginx
what `kdn export` made of it, each behind a proxy that is a link of one rate for all connections. A
reader that knows nothing of the link, with new connections, has the context delivered: once as good
as it can be by a deadline, and once as good as asked for, however long that takes. Node and nginx
take turns, so that whatever else this machine does meets both.

Not measured: latency of a real network, TLS, caches in between.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from kdn.bench import options
from kdn.bench.link_proxy import shaped
from kdn.bench.options import JsonFile
from kdn.bench.report import hardware, report_console, write_json
from kdn.cache.keys import Chunk, Namespace, cut
from kdn.cache.tensors import KVCache
from kdn.calibrate.corpus import begun, default_texts, load_text, prompt_head
from kdn.checked import checked_deadline
from kdn.codec.base import Codec
from kdn.errors import UnsupportedError
from kdn.session.quality import enough_kld

MBITS = "5,20,50,200"
SERVERS = ("node", "nginx")
PUBLISH_S = 300.0


@dataclass(frozen=True)
class Document:
    """What a model has read."""

    codec: Codec
    chunks: Sequence[Chunk]
    cache: KVCache
    expected_kld: Sequence[float]


class Place(NamedTuple):
    address: tuple[str, int]
    path: str


class Goal(NamedTuple):
    deadline_s: float | None
    enough_kld: float


@dataclass(frozen=True)
class Delivery:
    server: str
    mbit: float
    deadline_s: float | None
    done_s: float
    lookup_s: float
    kld: float
    fetched_bytes: int
    levels: tuple[int, ...]
    troubles: int


@dataclass(frozen=True)
class Compared:
    """Medians of both, over one link."""

    mbit: float
    deadline_s: float | None
    node_s: float
    nginx_s: float
    node_level: float
    nginx_level: float
    same_levels: bool
    """Every delivery of both brought the same levels."""

    @property
    def ratio(self) -> float:
        return self.nginx_s / self.node_s


def run(
    model: Annotated[str, typer.Option(help="smollm2, a local folder, or a hub name.")] = "smollm2",
    text: Annotated[Path | None, options.files("The document; by default of Python's.")] = None,
    context: Annotated[int, options.count(512, "Tokens of it.")] = 4096,
    mbits: Annotated[str, typer.Option(help="Link rates, comma-separated, in Mbit/s.")] = MBITS,
    deadline: Annotated[float, typer.Option(help="Seconds.")] = 3.0,
    kld: Annotated[float, typer.Option(help="The quality asked for without a deadline.")] = 0.008,
    repeats: Annotated[int, options.count(1, "Deliveries of each kind.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """A delivery from plain nginx (`kdn export`) beside one from a node, over shaped links."""
    from kdn.engines.models import load_model

    rates = options.numbers("mbits", mbits, 0.1, 1e5)
    goals = [Goal(checked_deadline(deadline, "deadline"), 0.0), Goal(None, enough_kld(kld))]
    source = load_text(text) if text else default_texts()[0]
    told = Console(stderr=True)
    with told.status(f"reading {context} tokens of {source.name} with {model}"):
        document = _read(*load_model(model), source, context)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(Path(folder), document, rates, goals, repeats, told.print))
    compared = compare(rows)
    if json_file:
        settings = {"model": model, "text": source.name, "context": context, "kld": kld}
        every = {"rows": [asdict(row) for row in rows], "compared": [asdict(c) for c in compared]}
        write_json(json_file, {"settings": settings, "hardware": hardware("cpu"), **every})
    _print(report_console(), compared)


def _read(model: Any, tokenizer: Any, source: Any, context: int) -> Document:
    from kdn.codec import open_codec
    from kdn.engines.quality import QualityProbe
    from kdn.engines.transformers import spec_of

    spec = spec_of(model)
    codec = open_codec("klt", spec)
    tokens = begun(prompt_head(tokenizer), source.tokens(tokenizer))[: context + 16]
    if len(tokens) < context + 16:
        raise UnsupportedError(f"{source.name} has {len(tokens)} tokens, expected more")
    cache = QualityProbe(model, tokens, context).cache
    chunks = cut(tokens[:context], Namespace(spec.fingerprint, codec.profile_id))
    return Document(codec, chunks, cache, codec.expected_kld)


async def measure(
    folder: Path,
    document: Document,
    mbits: Sequence[float],
    goals: Sequence[Goal],
    repeats: int,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Delivery]:
    await publish_and_export(folder, document)
    rows = []
    with served(folder, "node") as node, served(folder, "nginx") as nginx:
        at = {"node": node, "nginx": nginx}
        await delivered(at["node"], None, document, Goal(None, 0.0))  # kernels are compiled
        for mbit, goal, number in product(mbits, goals, range(repeats)):
            for server in SERVERS if number % 2 else SERVERS[::-1]:
                row = await delivered(at[server], mbit, document, goal)
                row = replace(row, server=server)
                tell(f"{mbit:g} Mbit/s, {server}: {row.done_s:.2f} s, level {_level(row):.2f}")
                rows.append(row)
    return rows


async def publish_and_export(folder: Path, document: Document) -> None:
    """Into folder/node/data, for a node, and folder/export."""
    from kdn.delivery.publish import Publisher, Values
    from kdn.places.export import export
    from kdn.places.places import open_places
    from kdn.session.exporting import STREAMS

    chunks, values = document.chunks, Values(document.cache, final=True)
    async with open_places(folder / "node" / "data") as places:
        queue_bytes = 1 << 40
        async with Publisher(
            places.publish_to, document.codec, max_queue_bytes=queue_bytes
        ) as publisher:
            for chunk in chunks:
                publisher.publish(chunk, values)
            if not await publisher.flush(PUBLISH_S):
                raise UnsupportedError(f"the document was not published within {PUBLISH_S:g} s")
        manifest = {"models": {"00": {"chunks": [chunk.key.hex() for chunk in chunks]}}}
        await places.names.put("document", manifest, None)
        await export(places, folder / "export", STREAMS)


@contextmanager
def served(folder: Path, server: str) -> Iterator[Place]:
    from kdn.bench.node_servers import start_kdn
    from kdn.bench.web_server import start_web

    if server == "nginx":
        with start_web(folder / "export", folder / "web") as web:
            yield Place(web.address, "/kdn")
    else:
        with start_kdn(folder / "node") as node:
            yield Place(node.address, "")


async def delivered(place: Place, mbit: float | None, document: Document, goal: Goal) -> Delivery:
    """Over a link of its own."""
    from kdn.delivery.client import deliver
    from kdn.delivery.request import FAR_S, Request
    from kdn.delivery.sink import HostSink
    from kdn.places.places import open_places

    codec, chunks = document.codec, document.chunks
    sink = HostSink.of(codec, chunks, document.cache.dtype)
    request = Request(
        chunks, codec, document.expected_kld, sink, goal.deadline_s or FAR_S, goal.enough_kld
    )
    with shaped(place.address, None if mbit is None else mbit * 1e6) as link:
        url = f"http://127.0.0.1:{link.address[1]}{place.path}"
        async with open_places(url) as places:
            result = await deliver(request, places.endpoints)
    return Delivery(
        "", mbit or 0.0, goal.deadline_s, result.done_s, result.lookup_s, result.kld,
        result.fetched_bytes, tuple(result.levels), len(result.troubles),
    )  # fmt: skip


def compare(rows: Sequence[Delivery]) -> list[Compared]:
    found = []
    for mbit, deadline_s in dict.fromkeys((row.mbit, row.deadline_s) for row in rows):
        some = [row for row in rows if (row.mbit, row.deadline_s) == (mbit, deadline_s)]
        node, nginx = ([row for row in some if row.server == name] for name in SERVERS)
        times = [median(row.done_s for row in each) for each in (node, nginx)]
        levels = [median(_level(row) for row in each) for each in (node, nginx)]
        same = len({row.levels for row in some}) == 1
        found.append(Compared(mbit, deadline_s, times[0], times[1], levels[0], levels[1], same))
    return found


def _level(row: Delivery) -> float:
    return sum(row.levels) / len(row.levels)


def _print(console: Console, compared: Sequence[Compared]) -> None:
    table = Table("Mbit/s", "deadline", "node", "nginx", "ratio", "node's level", "nginx's", "same")
    for one in compared:
        deadline = "none" if one.deadline_s is None else f"{one.deadline_s:g} s"
        table.add_row(
            f"{one.mbit:g}", deadline, f"{one.node_s:.2f} s", f"{one.nginx_s:.2f} s",
            f"{one.ratio:.3f}", f"{one.node_level:.2f}", f"{one.nginx_level:.2f}",
            "yes" if one.same_levels else "no",
        )  # fmt: skip
    console.print(table)
