"""`kdn bench ttft`: seconds to the first token of an answer about a document, over real sockets.

A model that never read the document is asked about it. Either it reads the text, or it gets what an
other instance has published: as 16-bit values, as 8-bit ones, as the CacheGen paper codes it at one
level, or as klt at the quality asked for, adapted to the link. A node in its own process serves
the chunks over loopback, shaped to a rate or a recorded trace. Each row has a new node, a new
connection and an estimator that knows nothing; reading the text is timed anew for each link. What
is loaded is then held against the exact cache (KLD, recall) and answers a question.

Not measured: the way of the text itself (16 KB), latency of a real network, TLS.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console

from kdn.bench import options
from kdn.bench.options import JsonFile, PlotFile
from kdn.bench.report import hardware, report_console, write_json
from kdn.bench.ttft_report import TtftRow, document, plot, print_report
from kdn.cache.keys import Namespace, TokenIds, cut
from kdn.cache.tensors import KVCache
from kdn.calibrate.corpus import (
    begun,
    default_calibration,
    default_texts,
    load_text,
    prompt_head,
)
from kdn.errors import UnsupportedError
from kdn.node.traces import TraceRate
from kdn.session.quality import enough_kld

if TYPE_CHECKING:
    from kdn.codec.base import Codec
    from kdn.delivery.plan import Policy
    from kdn.delivery.request import Request, Result
    from kdn.engines.quality import QualityProbe

MBITS = "1,10,50,200,1000"
WAYS = ("fp16", "int8", "cachegen", "klt")
CONTINUATION_TOKENS = 128
ANSWER_TOKENS = 24
CALIBRATION_TOKENS = 25_000
CACHEGEN_LEVEL = 3
"""The coarsest of its delta levels whose KLD is near 0.01."""
REPEATS = 3
HOPELESS = 1.3
"""A way that takes so many times what reading takes is stopped."""
QUESTION = "\n\nQuestion: What is the text above about? Answer in one sentence.\nAnswer:"


@dataclass(frozen=True)
class Way:
    """How a context comes to the reader."""

    name: str
    codec: Codec
    policy: Policy
    expected_kld: tuple[float, ...]
    enough_kld: float = 0.0
    reads: bool = False
    """Whether the model reads on the way, where that is faster."""


def run(
    model: Annotated[str, typer.Option(help="smollm2, a local folder, or a hub name.")] = "smollm2",
    text: Annotated[Path | None, options.files("The document; by default of Python's.")] = None,
    context: Annotated[int, options.count(512, "Tokens of it.")] = 4096,
    mbits: Annotated[str, typer.Option(help="Link rates, comma-separated, in Mbit/s.")] = MBITS,
    traces: Annotated[str, typer.Option(help="Recorded links (t_s,mbps), comma-separated.")] = "",
    kld: Annotated[float, typer.Option(help="The quality asked of klt.")] = 0.008,
    ways: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(WAYS),
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time to the first token over shaped links: read, fetched, or delivered by kdn."""
    from kdn.engines.grouped import use_grouped_attention
    from kdn.engines.models import load_model
    from kdn.engines.quality import QualityProbe

    links = _links(mbits, traces)
    names = options.words("ways", ways, WAYS)
    kld = enough_kld(kld)
    source = load_text(text) if text else default_texts()[0]
    told = Console(stderr=True)
    with told.status(f"loading {model}"):
        loaded, tokenizer = load_model(model)
        use_grouped_attention(loaded)
    tokens = begun(prompt_head(tokenizer), source.tokens(tokenizer))
    tokens = tokens[: context + CONTINUATION_TOKENS]
    if len(tokens) < context + CONTINUATION_TOKENS:
        raise UnsupportedError(f"{source.name} has {len(tokens)} tokens, expected more")
    with told.status(f"reading {context} tokens of {source.name}"):
        probe = QualityProbe(loaded, tokens, context)
    question = np.asarray(tokenizer(QUESTION, add_special_tokens=False).input_ids, np.uint32)
    bench = Bench(loaded, tokens[:context], question, probe, told)
    chosen = bench.open_ways(names, tokenizer, kld)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(bench.measure(chosen, links, Path(folder)))
    extra: dict[str, Any] = {
        "settings": {"model": model, "text": source.name, "context": context, "kld": kld},
        "answer": tokenizer.decode(bench.answer),
        "hardware": hardware("cpu"),
    }
    if json_file:
        write_json(json_file, document(rows, extra), allow_nan=False)
    if plot_file:
        plot(plot_file, rows)
    print_report(report_console(), rows, extra)


def _links(mbits: str, traces: str) -> dict[str, dict[str, object]]:
    """Name of each link to the node settings that shape it."""
    links: dict[str, dict[str, object]] = {}
    for one in options.numbers("mbits", mbits, 0.001, 1e6) if mbits else ():
        links[f"{one:g} Mbit/s"] = {"egress_bits_per_s": round(one * 1e6)}
    for path in map(Path, filter(None, traces.split(","))):
        TraceRate.read(path)  # a file that is no trace is told at once
        links[path.stem] = {"egress_trace": str(path.resolve())}
    return links


class Bench:
    """One document and one question, asked in many ways."""

    def __init__(
        self, model: Any, tokens: TokenIds, question: TokenIds, probe: QualityProbe, told: Console
    ) -> None:
        self._model, self._tokens, self._question = model, tokens, question
        self._probe, self._told = probe, told
        self._speeds: Any = None
        self._rooms: Any = None
        self._graded: dict[tuple[object, ...], tuple[float, float, bool]] = {}
        self.answer = self._answer_from(probe.cache)

    def open_ways(self, names: Sequence[str], tokenizer: Any, kld: float) -> list[Way]:
        from kdn.bench.calibration import Calibration
        from kdn.bench.delivery.policies import fixed
        from kdn.bench.rivals.cachegen import CacheGenCodec
        from kdn.bench.rivals.plain import Half, Int8
        from kdn.bench.ttft_codecs import cachegen_at, plain
        from kdn.codec import open_codec
        from kdn.delivery.planner import default
        from kdn.engines.growing import Rooms
        from kdn.engines.speeds import measured_speeds
        from kdn.engines.transformers import spec_of

        spec = spec_of(self._model)
        self._rooms = Rooms(spec, self._model.dtype)
        self._rooms.prepare(len(self._tokens) + len(self._question), 1)
        ways = []
        for name in names:
            if name == "klt":
                klt = open_codec("klt", spec)
                self._speeds = measured_speeds(self._model, klt)
                told = klt.expected_kld
                ways.append(Way("klt", klt, default, told, kld, reads=True))
            elif name == "cachegen":
                texts = [(one, one.tokens(tokenizer)) for one in default_calibration()]
                with self._told.status("fitting CacheGen's tables"):
                    profile = Calibration.of(
                        self._model, spec, texts, window_tokens=3072,
                        num_tokens=CALIBRATION_TOKENS, seed=0, head=prompt_head(tokenizer),
                    ).cachegen()  # fmt: skip
                codec = cachegen_at(CacheGenCodec(spec, profile), CACHEGEN_LEVEL)
                ways.append(Way("cachegen", codec, fixed, (0.0,)))
            else:
                codec = plain(Half(spec) if name == "fp16" else Int8(spec))
                ways.append(Way(name, codec, fixed, (0.0,)))
        return ways

    async def measure(
        self, ways: Sequence[Way], links: Mapping[str, Mapping[str, object]], folder: Path
    ) -> list[TtftRow]:
        await self._publish(ways, folder)
        rows = []
        for link, settings in links.items():
            text_s = self._read_text()
            rows.append(TtftRow(link, "text", text_s, text_s, text_s, text_s, 0.0, 0.0, True))
            self._told.print(f"{link}: text {text_s:.2f} s")
            for way in ways:
                row = await self._row(way, link, settings, text_s, folder)
                self._told.print(f"{link}: {way.name} {row.ttft_s:.2f} s, KLD {row.kld:.4f}")
                rows.append(row)
        return rows

    async def _publish(self, ways: Sequence[Way], folder: Path) -> None:
        from kdn.bench.node_servers import start_kdn
        from kdn.delivery.client import deliver
        from kdn.delivery.endpoints import Endpoint
        from kdn.delivery.publish import Publisher, Values
        from kdn.store.http import HttpStore

        with start_kdn(folder) as node, self._told.status("publishing"):
            host, port = node.address
            store = HttpStore(f"http://{host}:{port}")
            for way in ways:
                async with Publisher(Endpoint(store), way.codec) as publisher:
                    for chunk in self._chunks(way.codec):
                        publisher.publish(chunk, Values(self._probe.cache, final=True))
                    if not await publisher.flush(120.0):
                        raise UnsupportedError(f"{way.name} was not published within 120 s")
                # A first delivery, untimed, over the open link: kernels are compiled on first use.
                room = self._rooms.take(len(self._tokens))
                request = self._request(way, self._chunks(way.codec), None, 60.0, room)
                await deliver(request, [store], policy=way.policy)
                self._rooms.give(room)
            await store.close()

    def _chunks(self, codec: Codec) -> Any:
        return cut(self._tokens, Namespace(codec.spec.fingerprint, codec.profile_id))

    def _read_text(self) -> float:
        from kdn.engines.reading import forward, new_cache

        begin_s = time.perf_counter()
        tokens = np.concatenate([self._tokens, self._question])
        int(forward(self._model, tokens, new_cache(self._model)).argmax())
        return time.perf_counter() - begin_s

    async def _row(
        self, way: Way, link: str, settings: Mapping[str, object], text_s: float, folder: Path
    ) -> TtftRow:
        times: list[float] = []
        while len(times) < REPEATS:
            ttft_s, result = await self._first_token(way, settings, HOPELESS * text_s, folder)
            if result.recompute:
                stopped = not way.reads
                return TtftRow(link, way.name, ttft_s, ttft_s, ttft_s, text_s, stopped=stopped)
            times.append(ttft_s)
            if ttft_s > text_s / 3:
                break
        kld, recall, same = self._grade(way, result)
        return TtftRow(
            link, way.name, median(times), min(times), max(times), text_s, kld, recall, same,
            num_bytes=result.fetched_bytes, levels=result.levels, computed=sum(result.computed),
        )  # fmt: skip

    async def _first_token(
        self, way: Way, settings: Mapping[str, object], limit_s: float, folder: Path
    ) -> tuple[float, Result]:
        """From the request until the first token of the answer is known."""
        from kdn.bench.node_servers import start_kdn
        from kdn.delivery.client import deliver
        from kdn.engines.compute import ChunkReader
        from kdn.engines.reading import forward
        from kdn.store.http import HttpStore

        chunks = self._chunks(way.codec)
        room = self._rooms.take(len(self._tokens))
        with start_kdn(folder, settings) as node:
            host, port = node.address
            begin_s = time.perf_counter()
            store = HttpStore(f"http://{host}:{port}")
            reader = ChunkReader(self._model, chunks) if way.reads else None
            request = self._request(way, chunks, reader, limit_s, room)
            result = await deliver(request, [store], policy=way.policy)
            if reader is not None:
                await reader.finish()
            if result.recompute and way.reads:
                self._read_text()
            elif not result.recompute:
                int(forward(self._model, self._question, self._past(_cache(result), room)).argmax())
            took_s = time.perf_counter() - begin_s
            await store.close()
        self._rooms.give(room)
        return took_s, result

    def _request(self, way: Way, chunks: Any, reader: Any, limit_s: float, room: Any) -> Request:
        from kdn.delivery.request import FAR_S, Request
        from kdn.delivery.sink import HostSink

        sink = HostSink(way.codec, room.canonical(chunks[-1].end))
        if reader is None:
            return Request(chunks, way.codec, way.expected_kld, sink, deadline_s=limit_s)
        return Request(
            chunks, way.codec, way.expected_kld, sink, deadline_s=FAR_S,
            enough_kld=way.enough_kld, speeds=self._speeds, compute=reader,
            shared=self._model.device.type == "cpu",
        )  # fmt: skip

    def _past(self, cache: KVCache, room: Any) -> Any:
        """What the model goes on from: the room itself, if no layer has a window."""
        from kdn.engines.growing import growing_cache
        from kdn.engines.transformers import to_dynamic_cache

        past = growing_cache(self._model.config)
        if any(getattr(layer, "is_sliding", False) for layer in past.layers):
            return to_dynamic_cache(cache, self._model.config)
        past.layers = [room.layer(index, cache.end) for index in range(len(past.layers))]
        return past

    def _next_token(self, cache: KVCache) -> tuple[int, Any]:
        from kdn.engines.reading import forward
        from kdn.engines.transformers import to_dynamic_cache

        past = to_dynamic_cache(cache, self._model.config)
        return int(forward(self._model, self._question, past).argmax()), past

    def _answer_from(self, cache: KVCache) -> list[int]:
        """Greedy."""
        from kdn.engines.reading import forward

        token, past = self._next_token(cache)
        answer = [token]
        while len(answer) < ANSWER_TOKENS:
            answer.append(int(forward(self._model, answer[-1:], past).argmax()))
        return answer

    def _grade(self, way: Way, result: Result) -> tuple[float, float, bool]:
        """KLD, recall KLD, and whether the answer is the exact cache's. Once for each outcome."""
        outcome = (way.name, result.levels, result.computed)
        if outcome not in self._graded:
            quality = self._probe.measure(_cache(result))
            same = self._answer_from(_cache(result)) == self.answer
            self._graded[outcome] = (quality.kld, quality.recall_kld, same)
        return self._graded[outcome]


def _cache(result: Result) -> KVCache:
    """What was delivered into main memory."""
    from kdn.delivery.sink import HostSink

    assert isinstance(result.sink, HostSink)
    return result.sink.cache
