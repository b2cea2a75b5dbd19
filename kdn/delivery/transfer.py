"""Requests on their way: as many as fill the link, each resumed, hedged or given up in time.

`pump` sends requests for what a plan wants and is neither here nor asked for, in the plan's order,
until the bytes in flight fill the link (rate times round trip, with room to grow): more would only
make a change of plan late, and what is wanted first wait for what comes with it. An unknown link is
tried with little, and with more as it proves itself. What a broken request did not bring is missing
as before, so it is asked for again from its next byte, wherever the same stream is to be had.
`watch` asks another endpoint when one is late, and gives up connections that have gone silent.
Bytes of two streams never meet: every request names its stream's etag, and its bytes go to that
stream's assembly only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kdn.delivery.assemble import Assembly, Intervals
from kdn.delivery.endpoints import Endpoint, Endpoints
from kdn.delivery.flight import Flight, Landing, Limits, Part, ThroughputEstimator, size_of
from kdn.delivery.lookup import Incoming, Question, look_again
from kdn.delivery.plan import Fetch, Link
from kdn.errors import KdnError
from kdn.store.streaming import Ask
from kdn.tracing import span

MAX_RESTARTS = 3
MAX_DAMAGES = 2
MAX_PARTS = 1024
MAX_TROUBLES = 32
CLOSE_S = 1.0
FIRST_BYTE_S = 0.2
"""A first byte that takes longer is no mere latency."""
VERIFY_SOON_S = 0.005
"""A level that is here waits for others of its stream that come within this time: all are verified
in one go."""


class Transfer:
    def __init__(
        self,
        incoming: Sequence[Incoming],
        question: Question,
        endpoints: Endpoints,
        estimator: ThroughputEstimator,
        limits: Limits,
        until_s: float,
        asked: asyncio.Event | None = None,
    ) -> None:
        """`asked` is set when something has been asked for."""
        self.changed = asyncio.Event()
        """Set when a level is complete, a request has ended, or a chunk was lost."""
        self.fetched_bytes = 0
        self.failures = 0
        self.first_byte_s: float | None = None
        self.troubles: list[str] = []
        self._asked = asked or asyncio.Event()
        self._incoming = incoming
        self._question = question
        self._clock = question.clock
        self._endpoints = endpoints
        self._estimator = estimator
        self._limits = limits
        self._until_s = until_s
        self._flights: set[Flight] = set()
        self._dropped: set[asyncio.Task[None]] = set()  # cancelled, not yet ended
        self._searches: dict[int, asyncio.Task[None]] = {}
        self._checks: set[asyncio.Task[None]] = set()
        # Those that could be verified, and since when.
        self._ripening: dict[Assembly, tuple[Incoming, float]] = {}
        self._late: set[Endpoint] = set()  # had to be overtaken, and brought nothing since
        self._damages: Counter[tuple[Endpoint, bytes]] = Counter()
        # Who brought bytes since the last that did not verify were forgotten.
        self._sources: dict[Assembly, set[Endpoint]] = {}
        self._latency_s = float("inf")
        self._started_s = 0.0  # when the link became busy, and whether anything came since
        self._heard = False
        self._heard_s = question.clock()
        self._crash: BaseException | None = None
        self._all_asked: Sequence[Fetch] = ()  # of these nothing is left to ask for

    # what the link looks like

    @property
    def in_flight_bytes(self) -> int:
        return sum(flight.left_bytes for flight in self._flights if not flight.late)

    @property
    def is_searching(self) -> bool:
        return bool(self._searches)

    def link(self) -> Link:
        """As estimated; with the least latency that was seen, which no stall has part in."""
        link = self._estimator.link()
        known = self._latency_s < float("inf")
        return replace(link, latency_s=self._latency_s) if known else link

    def quiet_s(self) -> float:
        """Since the last byte, or since the beginning."""
        return self._clock() - self._heard_s

    def window_bytes(self) -> int:
        link, limits = self.link(), self._limits
        window_s = max(3 * link.latency_s, limits.window_s)
        proven = limits.first_window_bytes + 4 * self.fetched_bytes
        wanted = min(link.rate * window_s, max(proven, link.low_rate * window_s))
        return int(min(wanted, limits.max_window_bytes))

    # what comes another way

    def begins_elsewhere(self) -> None:
        """Bytes are about to come that are no request's of this transfer."""
        self._asked.set()
        if not self._is_link_busy():
            self._link_starts(self._clock())

    def came_elsewhere(self, num_bytes: int) -> None:
        now_s = self._heard_s = self._clock()
        if num_bytes:
            self.fetched_bytes += num_bytes
            self.first_byte_s = self.first_byte_s or now_s
            self._estimator.add(num_bytes, now_s)

    def ended_elsewhere(self) -> None:
        if not self._is_link_busy():
            self._estimator.idle(self._clock())

    def note_trouble(self, endpoint: Endpoint, what: str) -> None:
        self._trouble(endpoint, what)

    # requests

    def pump(self, fetches: Sequence[Fetch]) -> None:
        """Ask for what is missing of these, in order, as far as the link has room."""
        if fetches is self._all_asked:
            return
        room_bytes, request_bytes = self._room()
        if not room_bytes:
            return
        batches: dict[Endpoint, list[Part]] = {}
        for endpoint, part in self._wanted(fetches):
            while part.start < part.end and room_bytes > 0:
                batch = batches.setdefault(endpoint, [])
                size = min(part.end - part.start, request_bytes - size_of(batch), room_bytes)
                batch.append(part._replace(end=part.start + size))
                part = part._replace(start=part.start + size)
                room_bytes -= size
                if size_of(batch) >= request_bytes or len(batch) >= MAX_PARTS:
                    self._launch(endpoint, batches.pop(endpoint))
            if room_bytes <= 0:
                break
        for endpoint, batch in batches.items():
            self._launch(endpoint, batch)

    def _room(self) -> tuple[int, int]:
        """How many bytes to ask for now, and how many of them in one request.

        Requests side by side share the link: where it is slow or unknown, one follows the other, so
        that what is wanted first comes first."""
        link, limits, window_bytes = self.link(), self._limits, self.window_bytes()
        request_bytes = max(window_bytes // 4, limits.min_request_bytes)
        is_slow = window_bytes <= limits.first_window_bytes + limits.min_request_bytes
        enough_bytes = min(1.5 * link.rate * link.latency_s, window_bytes)
        if not is_slow:
            enough_bytes = max(enough_bytes, window_bytes - request_bytes // 2)
        elif not self.fetched_bytes:
            enough_bytes, request_bytes = 0, limits.first_window_bytes
        in_flight_bytes = self.in_flight_bytes
        if in_flight_bytes > enough_bytes:
            return 0, request_bytes
        room_bytes = request_bytes if is_slow else window_bytes - in_flight_bytes
        return max(room_bytes, request_bytes), request_bytes

    def _wanted(self, fetches: Sequence[Fetch]) -> Iterator[tuple[Endpoint, Part]]:
        asked: dict[int, Intervals] = {}
        tardy: dict[int, set[Endpoint]] = {}
        skipped = False
        for flight in self._flights:
            for part in flight.parts:
                if flight.late:
                    tardy.setdefault(part.incoming.number, set()).add(flight.endpoint)
                else:
                    asked.setdefault(id(part.assembly), Intervals()).add(part.start, part.end)
        for fetch in fetches:
            incoming = self._incoming[fetch.chunk]
            assembly = incoming.assembly
            if assembly.is_ripe:  # its verification was cancelled
                self._verify(incoming, assembly)
            levels = min(fetch.levels, assembly.stored)  # it may have been cut since the plan
            if levels <= assembly.levels:
                continue
            taken = asked.setdefault(id(assembly), Intervals())
            missing = assembly.missing(assembly.level_ends[levels - 1])
            gaps = [gap for part in missing for gap in taken.missing(*part)]
            if not gaps:
                continue
            endpoint = None
            if self._num_requests() < self._limits.requests:
                endpoint = self._choose(incoming, tardy.get(fetch.chunk, set()))
            if endpoint is None:
                skipped = True
                continue
            for start, end in gaps:
                taken.add(start, end)
                yield endpoint, Part(incoming, assembly, start, end)
        if not skipped:
            self._all_asked = fetches

    def _num_requests(self) -> int:
        return sum(not flight.late for flight in self._flights)

    def _choose(self, incoming: Incoming, avoid: set[Endpoint]) -> Endpoint | None:
        """The first endpoint that may have it and is not resting; better one that is not late."""
        if incoming.lost or incoming.computed:
            return None
        if incoming.alone:
            return next((e for e in self._endpoints if e not in incoming.lacking), None)
        now_s, out = self._clock(), incoming.lacking | avoid
        able = [e for e in self._endpoints if e not in out and e.rest.is_over(now_s)]
        return next((e for e in able if e not in self._late), able[0] if able else None)

    def _launch(self, endpoint: Endpoint, parts: list[Part]) -> None:
        now_s, link, size = self._clock(), self.link(), size_of(parts)
        queue_s = 2 * (self.in_flight_bytes + size) / max(link.rate, 1.0)
        patience_s = self._limits.hedge_s + 4 * link.latency_s + queue_s
        flight = Flight(endpoint, parts, now_s, now_s, size, patience_s)
        flight.task = asyncio.create_task(self._fly(flight))
        self._asked.set()
        if not endpoint.local and not self._is_link_busy():
            self._link_starts(now_s)
        self._flights.add(flight)
        flight.task.add_done_callback(self._note_crash)

    async def _fly(self, flight: Flight) -> None:
        asks = [
            Ask(part.incoming.chunk.key, part.start, part.end, part.assembly.stream_id)
            for part in flight.parts
        ]
        try:
            landing = Landing(flight, self._take, self._miss)
            size, name = flight.left_bytes, flight.endpoint.name
            with span("kdn.fetch", endpoint=name, spans=len(asks), bytes=size):
                await flight.endpoint.store.read_into(asks, landing)
            for part in landing.short:  # all was answered: there it was cut since the lookup
                self._trouble(flight.endpoint, f"chunk {part.incoming.number} is shorter there")
                self._is_gone(part.incoming, part.assembly, flight.endpoint)
        except (KdnError, OSError) as error:
            self._fail(flight, str(error))
        finally:
            self._end(flight)

    def _end(self, flight: Flight) -> None:
        if flight in self._flights:
            self._flights.discard(flight)
            others = [one for one in self._flights if not one.endpoint.local]
            if not others:
                self._estimator.idle(self._clock())
            elif all(one.heard_s == one.began_s for one in others):
                # Nothing was under way but requests: until their first byte, that is latency.
                self._link_starts(min(one.began_s for one in others))
        self.changed.set()

    def _is_link_busy(self) -> bool:
        return any(not flight.endpoint.local for flight in self._flights)

    def _link_starts(self, began_s: float) -> None:
        self._estimator.started(began_s)
        self._started_s, self._heard = began_s, False

    def _hear(self, flight: Flight) -> float:
        now_s = self._clock()
        if flight.heard_s == flight.began_s:
            self._latency_s = min(self._latency_s, now_s - flight.began_s)
            flight.endpoint.rest.worked()
        self._late.discard(flight.endpoint)
        flight.heard_s = self._heard_s = now_s
        return now_s

    def _miss(self, flight: Flight, part: Part) -> None:
        flight.heard_s = self._heard_s = self._clock()
        flight.left_bytes -= part.end - part.start
        self._is_gone(part.incoming, part.assembly, flight.endpoint)

    def _take(self, flight: Flight, part: Part, num_bytes: int) -> None:
        """Bytes have arrived, and are in their place."""
        now_s, assembly = self._hear(flight), part.assembly
        flight.left_bytes -= num_bytes
        self.fetched_bytes += num_bytes
        part.incoming.bring(flight.endpoint, num_bytes)
        if self.first_byte_s is None:
            self.first_byte_s = now_s
        if not flight.endpoint.local:
            self._heard = True
            self._estimator.add(num_bytes, now_s)
        self._sources.setdefault(assembly, set()).add(flight.endpoint)
        if assembly.is_ripe:
            left_bytes = part.end - assembly.arrived_bytes
            if 0 < left_bytes < VERIFY_SOON_S * self._estimator.link().rate:
                self._ripening.setdefault(assembly, (part.incoming, now_s))
            else:
                self._verify(part.incoming, assembly)

    def _verify_ripe(self, now_s: float) -> None:
        """What did not come as soon as was expected is not waited for."""
        for assembly, (incoming, since_s) in list(self._ripening.items()):
            if not assembly.is_ripe:
                del self._ripening[assembly]
            elif now_s - since_s >= VERIFY_SOON_S:
                self._verify(incoming, assembly)

    def _verify(self, incoming: Incoming, assembly: Assembly) -> None:
        self._ripening.pop(assembly, None)
        task = asyncio.create_task(self._verified(incoming, assembly))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)
        task.add_done_callback(self._note_crash)

    async def _verified(self, incoming: Incoming, assembly: Assembly) -> None:
        """Beside the transfer."""
        levels, damages = assembly.levels, assembly.damages
        await assembly.verify()
        if assembly.levels > levels:
            self.changed.set()
        if assembly.damages > damages:
            self._blame(incoming, assembly, self._sources.pop(assembly, set()))

    def _blame(self, incoming: Incoming, assembly: Assembly, sources: set[Endpoint]) -> None:
        """Whoever brought a damaged level, if it was one alone. Of several it may have been any:
        then it is to come from one."""
        incoming.alone = True
        self._all_asked = ()
        for endpoint in sources:
            self._trouble(endpoint, f"chunk {incoming.number} arrived damaged")
        if len(sources) == 1:
            [endpoint] = sources
            self._damages[endpoint, assembly.stream_id] += 1
            if self._damages[endpoint, assembly.stream_id] >= MAX_DAMAGES:
                endpoint.reject(incoming.chunk.key, assembly.stream_id, self._clock())
                self._is_gone(incoming, assembly, endpoint)

    # trouble

    def watch(self) -> None:
        """Give up dead connections and what nobody needs any more; ask elsewhere what is late."""
        now_s, link = self._clock(), self.link()
        self._verify_ripe(now_s)
        overdue = now_s - self._started_s > max(4 * link.latency_s, FIRST_BYTE_S)
        if self._is_link_busy() and (self._heard or overdue):
            self._estimator.add(0, now_s)
        silence_s = max(self._limits.silence_s, 6 * link.latency_s)
        heard_s: dict[Endpoint, float] = {}
        for flight in self._flights:
            heard_s[flight.endpoint] = max(heard_s.get(flight.endpoint, 0.0), flight.heard_s)
        for flight in list(self._flights):
            quiet_s = now_s - flight.heard_s
            all_quiet = now_s - heard_s[flight.endpoint] >= silence_s
            overtaken = heard_s[flight.endpoint] > flight.heard_s + flight.patience_s
            if quiet_s >= silence_s and (all_quiet or quiet_s >= 3 * silence_s):
                self._drop(flight)
                self._fail(flight, f"silent for {quiet_s:.1f} s")
            elif quiet_s >= 2 * flight.patience_s and overtaken:
                # Only this connection hangs: ask again on another.
                self._drop(flight)
                self._trouble(flight.endpoint, f"overtaken, silent for {quiet_s:.1f} s")
            elif not flight.is_needed:
                self._drop(flight)
            elif quiet_s >= flight.patience_s and not flight.late and self._has_other(flight):
                flight.late = True
                self._late.add(flight.endpoint)
                self._trouble(flight.endpoint, f"late by {quiet_s:.2f} s")

    def _has_other(self, flight: Flight) -> bool:
        return any(self._choose(part.incoming, {flight.endpoint}) for part in flight.parts)

    def _drop(self, flight: Flight) -> None:
        assert flight.task is not None
        flight.task.cancel()
        self._dropped.add(flight.task)
        flight.task.add_done_callback(self._dropped.discard)
        self._end(flight)

    def _fail(self, flight: Flight, why: str) -> None:
        self.failures += 1
        flight.endpoint.rest.failed(flight.began_s, self._clock(), self._question.rng)
        self._trouble(flight.endpoint, why)

    def _trouble(self, endpoint: Endpoint, what: str) -> None:
        self._all_asked = ()
        if len(self.troubles) < MAX_TROUBLES:
            self.troubles.append(f"{endpoint.name}: {what}"[:300])

    def _is_gone(self, incoming: Incoming, assembly: Assembly, endpoint: Endpoint) -> None:
        """This endpoint has not (or no longer) this stream. If none has, look for another one."""
        if assembly is not incoming.assembly:
            return
        self._all_asked = ()
        incoming.lacking.add(endpoint)
        nobody = all(e in incoming.lacking for e in self._endpoints)
        if nobody and incoming.number not in self._searches and not incoming.lost:
            search = asyncio.create_task(self._search(incoming))
            self._searches[incoming.number] = search
            search.add_done_callback(self._note_crash)

    async def _search(self, incoming: Incoming) -> None:
        """Somebody may have published other bytes under this key: begin anew with them."""
        try:
            found = None
            if incoming.restarts < MAX_RESTARTS:
                question = replace(self._question, chunks=[incoming.chunk])
                streams = await look_again(question, self._endpoints, self._until_s)
                found = streams[incoming.chunk.key]
            if found is None or found.assembly.stored <= incoming.decoded:
                incoming.lost = True  # what is decoded stays
            else:
                incoming.restart(found)
        finally:
            self._all_asked = ()
            del self._searches[incoming.number]
            self.changed.set()

    # the end

    def _note_crash(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._crash = self._crash or task.exception()
            self.changed.set()

    def raise_crash(self) -> None:
        """A mistake of ours, not of the network's."""
        if self._crash is not None:
            raise self._crash

    async def close(self) -> None:
        """Every request is cancelled, every connection it held is closed or free again."""
        flying = [flight.task for flight in self._flights if flight.task]
        tasks = [*flying, *self._dropped, *self._searches.values(), *self._checks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
