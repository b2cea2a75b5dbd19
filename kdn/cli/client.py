"""`kdn learn`, `kdn ask`, `kdn explain`: the client on the command line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kdn.checked import checked_deadline, checked_text, shown
from kdn.config import load_config
from kdn.defaults import CODEC, DEVICE, MODEL, QUALITY
from kdn.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from kdn.client.answers import Stats
    from kdn.client.asynchronous import AsyncClient
    from kdn.client.explain import Explanation
    from kdn.client.joining import Names


@dataclass(frozen=True)
class Own:
    """Files that prove who asks, and whom to trust; None: as the configuration tells."""

    token_file: Path | None = None
    secret_file: Path | None = None
    tls_ca: Path | None = None


@dataclass(frozen=True)
class Freshness:
    """How new what a name says must be."""

    latest: bool = False
    stale_ok: bool = False


@dataclass(frozen=True)
class Door:
    """Where and how to connect, as flags tell; None: as the configuration tells."""

    config: Path | None = None
    where: list[str] | None = None
    model: str = MODEL
    device: str = DEVICE
    dtype: str | None = None
    codec: str = CODEC
    quality: str = QUALITY
    own: Own = field(default_factory=Own)
    stored_quality: str | None = None


def run_with(door: Door, work: Callable[[AsyncClient], Awaitable[None]]) -> None:
    import uvloop

    from kdn.client.asynchronous import AsyncClient

    flags: dict[str, object] = {f"client.{name}": path for name, path in vars(door.own).items()}
    flags["client.stored_quality"] = door.stored_quality
    settings = load_config(door.config, flags).client
    credentials = settings.credentials

    async def connected() -> None:
        async with AsyncClient(
            door.where or settings.url,
            model=door.model,
            device=door.device,
            dtype=door.dtype,
            codec=door.codec,
            quality=as_quality(door.quality),
            stored_quality=as_quality(settings.stored_quality),
            token=credentials.token,
            secret=credentials.secret,
            tls_ca=credentials.tls_ca,
            request_log_bytes=settings.request_log_bytes,
            tracing=settings.tracing,
        ) as client:
            await work(client)

    uvloop.run(connected())


def as_quality(told: str) -> str | float:
    """A word, or a number."""
    try:
        return float(told)
    except ValueError:
        return told


def learn(door: Door, name: str, path: Path, head: str | None = None) -> None:
    from kdn.checked import checked_name
    from kdn.cli.progress import reading_bar

    checked_name(name)
    text = read_text(path)

    async def work(client: AsyncClient) -> None:
        with reading_bar(Console(stderr=True)) as report:
            done = await client.learn(name, text, head, on_read=report)
        total = done.known_chunks + done.new_chunks
        Console(highlight=False).print(
            f"{name}: {done.num_tokens:,} tokens in {total} chunks, {done.known_chunks} known "
            f"before; the model read {done.computed_tokens:,} tokens; {done.seconds:.1f} s",
            markup=False,
        )

    run_with(door, work)


def asked_about(name: str, question: str | None, pieces: list[str]) -> tuple[Names, str]:
    """`kdn ask NAME QUESTION`, or `kdn ask --with NAME --with NAME QUESTION`."""
    if pieces and question is not None:
        raise UnsupportedError("expected a name or --with, not both: each piece takes a --with")
    if not pieces and question is None:
        raise UnsupportedError("expected a name and a question: kdn ask NAME QUESTION")
    return (pieces, name) if pieces else (name, question or "")


def ask(
    door: Door,
    name: Names,
    question: str,
    deadline_s: float | None,
    max_tokens: int,
    freshness: Freshness,
    recompute_share: float | None,
) -> None:
    from kdn.checked import checked_name
    from kdn.cli.progress import bar

    for one in [name] if isinstance(name, str) else name:
        checked_name(one)
    checked_text("question", question)
    checked_deadline(deadline_s, "deadline")

    async def work(client: AsyncClient) -> None:
        console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
        with bar(notes) as report:
            answer = client.ask(
                name,
                question,
                deadline_s=deadline_s,
                max_new_tokens=max_tokens,
                on_progress=report,
                force_latest=freshness.latest,
                stale_ok=freshness.stale_ok,
                recompute_share=recompute_share,
            )
            first = await anext(answer, "")
        console.print(first, end="", markup=False, soft_wrap=True)
        async for piece in answer:
            console.print(piece, end="", markup=False, soft_wrap=True)
        console.print()
        notes.print(describe(answer.stats), style="dim", markup=False)
        notes.print(f"request {answer.stats.request_id}", style="dim", markup=False)

    run_with(door, work)


def describe(stats: Stats) -> str:
    """As "4,096 tokens known (4.9 MB in 0.8 s), 31 read; first token after 0.95 s"."""
    known = f"{stats.known_tokens:,} tokens known"
    if stats.known_tokens:
        known += f" ({stats.fetched_bytes / 1e6:.1f} MB in {stats.delivery_s:.2f} s)"
    line = f"{known}, {stats.computed_tokens:,} read; first token after {stats.ttft_s:.2f} s"
    joined = (
        f"{stats.joined_pieces} pieces joined: {stats.moved_tokens:,} tokens moved, "
        f"{stats.repaired_tokens:,} repaired, {stats.recomputed_tokens:,} recomputed"
    )
    blended = [joined] if stats.joined_pieces else []
    refined = (
        f"{stats.refined_chunks} chunks refined meanwhile ({stats.refined_bytes / 1e6:.1f} MB)"
    )
    finer = [refined] if stats.refined_chunks else []
    return "; ".join([line, *blended, *finer, *stats.troubles])


def explain(door: Door, path: Path | None, raw: bool, pieces: list[str]) -> None:
    from kdn.client.explain import explain as find_out
    from kdn.client.explain import explain_join

    if (path is None) != bool(pieces):
        raise UnsupportedError("expected a text, or the names of pieces with --with")
    text = "" if path is None else read_text(path)

    async def work(client: AsyncClient) -> None:
        engine = client.engine
        if pieces:
            show(await explain_join(client, pieces))
            return
        tokens = engine.tokenizer(text).input_ids if raw else engine.prompts.learn(text)[0]
        show(await find_out(client, tokens))

    run_with(door, work)


def show(found: Explanation) -> None:
    table = Table("tokens", "known", "why")
    for one in found.findings:
        table.add_row(f"{one.start:,} to {one.end:,}", "yes" if one.known else "no", one.why)
    console = Console(highlight=False)
    console.print(table)
    known = sum(one.end - one.start for one in found.findings if one.known)
    total = sum(one.end - one.start for one in found.findings)
    told = f"; loading them takes about {found.loading_s:.2f} s" if known else ""
    console.print(f"{known:,} of {total:,} tokens need no reading{told}")


def read_text(path: Path) -> str:
    try:
        return checked_text(str(path), path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{shown(str(path))}: expected a text file in UTF-8: {error}") from error
