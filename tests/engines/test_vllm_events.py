"""What routers are told, without vLLM: blocks of chunks, where they are, and no longer."""

from __future__ import annotations

import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kdn.cache.keys import Chunk, cut
from kdn.delivery.known import Known
from kdn.engines.vllm.event_publisher import EventPublisher, endpoint_of, is_bound
from kdn.engines.vllm.events import Event, Events, Removed, Stored
from kdn.engines.vllm.messages import LoadReport
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.telling import Telling
from kdn.errors import UnsupportedError
from kdn.session.changes import Change, Changes, Medium
from tests.engines.vllm_scheduling import BLOCK, SPACE, World, request

HOST, PLACE = Medium.HOST, Medium.PLACE


def hashed(num_tokens: int, size: int = 16, name: str = "a", first: int = 0) -> Any:
    """A request with block hashes as vLLM's: each of all tokens up to there."""
    made = request(name, num_tokens, first)
    made.block_hashes = [
        sha256(repr(made.all_token_ids[: end + size]).encode()).digest()
        for end in range(0, num_tokens - size + 1, size)
    ]
    return made


def chunks_of(made: Any, end: int | None = None) -> list[Chunk]:
    return cut(made.all_token_ids[:end], SPACE)


def there(chunks: list[Chunk], medium: Medium, is_there: bool = True) -> list[Change]:
    return [Change(chunk.key, medium, is_there) for chunk in chunks]


def stored(events: list[Event], medium: Medium) -> list[bytes]:
    found = [e for e in events if isinstance(e, Stored) and e.medium is medium]
    return [one for event in found for one in event.blocks.hashes]


def removed(events: list[Event], medium: Medium) -> list[bytes]:
    found = [e for e in events if isinstance(e, Removed) and e.medium is medium]
    return [one for event in found for one in event.hashes]


class TestEvents:
    def test_a_chunk_is_told_as_its_blocks_with_parent_and_tokens(self) -> None:
        made, events = hashed(512), Events(16)
        events.follow(made, chunks_of(made))
        assert events.take() == []
        events.changed(there(chunks_of(made)[1:], PLACE))
        [event] = events.take()
        assert isinstance(event, Stored)
        assert list(event.blocks.hashes) == made.block_hashes[16:]
        assert event.blocks.parent == made.block_hashes[15]
        assert event.blocks.tokens.tolist() == made.all_token_ids[256:]
        assert events.take() == []

    @pytest.mark.parametrize("size", [16, 48, 96, 128, 512])
    def test_every_block_belongs_to_the_chunk_that_it_ends_in(self, size: int) -> None:
        made, events = hashed(1024, size), Events(size)
        for number, chunk in enumerate(chunks_of(made), 1):
            events.follow(made, [chunk])
            events.changed(there([chunk], PLACE))
            events.take()
            told = [one for one in made.block_hashes if events._told[PLACE][one]]
            assert told == made.block_hashes[: number * 256 // size]

    def test_what_comes_and_goes_before_it_is_taken_is_not_told(self) -> None:
        made, events = hashed(256), Events(16)
        events.follow(made, chunks_of(made))
        events.changed([*there(chunks_of(made), HOST), *there(chunks_of(made), HOST, False)])
        assert events.take() == []

    def test_a_block_stays_as_long_as_one_of_its_chunks_does(self) -> None:
        """A tail and the full chunk in its place begin with the same blocks."""
        made, events = hashed(512), Events(16)
        tail, full = chunks_of(made, 64), chunks_of(made, 256)
        events.follow(made, tail + full)
        events.changed(there(tail, PLACE))
        assert stored(events.take(), PLACE) == made.block_hashes[:4]
        events.changed(there(full, PLACE))
        [event] = events.take()
        assert isinstance(event, Stored)
        assert list(event.blocks.hashes) == made.block_hashes[4:16]
        assert event.blocks.parent == made.block_hashes[3]
        assert event.blocks.tokens.tolist() == made.all_token_ids[64:256]
        events.changed(there(full, PLACE, False))
        assert removed(events.take(), PLACE) == made.block_hashes[4:16]
        events.changed(there(tail, PLACE, False))
        assert removed(events.take(), PLACE) == made.block_hashes[:4]

    def test_media_are_told_apart(self) -> None:
        made, events = hashed(256), Events(16)
        events.follow(made, chunks_of(made))
        events.changed(there(chunks_of(made), HOST) + there(chunks_of(made), PLACE))
        told = events.take()
        assert stored(told, HOST) == stored(told, PLACE) == made.block_hashes
        events.changed(there(chunks_of(made), HOST, False))
        told = events.take()
        assert removed(told, HOST) == made.block_hashes
        assert not removed(told, PLACE)

    def test_what_is_forgotten_is_told_as_removed_and_memory_is_bounded(self) -> None:
        events, told = Events(16, max_chunks=4), set()
        for number in range(1, 20):
            made = hashed(512, name=str(number), first=1000 + number)
            events.follow(made, chunks_of(made))
            events.changed(there(chunks_of(made), PLACE))
            taken = events.take()
            told |= set(stored(taken, PLACE))
            told -= set(removed(taken, PLACE))
        assert len(told) == 4 * 16
        assert len(events._told[PLACE]) == 4 * 16

    def test_clear_takes_everything_back(self) -> None:
        made, events = hashed(512), Events(16)
        events.follow(made, chunks_of(made))
        events.changed(there(chunks_of(made), PLACE))
        events.take()
        events.clear()
        assert removed(events.take(), PLACE) == made.block_hashes

    def test_blocks_hashed_in_another_size_are_not_told(self) -> None:
        made, events = hashed(512, 32), Events(16)
        events.follow(made, chunks_of(made))
        events.changed(there(chunks_of(made), PLACE))
        assert events.take() == []

    def test_a_lookup_does_not_take_back_what_came_after_it_began(self) -> None:
        made, events = hashed(256), Events(16)
        events.follow(made, chunks_of(made))
        asked_at = events.num_changes
        events.changed(there(chunks_of(made), PLACE))
        events.changed(there(chunks_of(made), PLACE, False), asked_at)
        assert stored(events.take(), PLACE) == made.block_hashes
        events.changed(there(chunks_of(made), PLACE, False), events.num_changes)
        assert removed(events.take(), PLACE) == made.block_hashes


class Told(World):
    """A scheduler's side that tells."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.events = Events(BLOCK)
        self.side._telling = Telling(self.events)

    def ask(self, made: Any, known: int, heads: int = 0, *, late: bool = False) -> None:
        """`heads`: so many of the first known chunks are at a place, the others held here."""
        self.side.arrived(made)
        chunks = tuple(chunks_of(made, known))
        packed = {chunk.key: b"head" for chunk in chunks[:heads]}
        self.lookups[-1].set_result(Known(chunks, {}, late, packed))
        self.side.matched(made, 0)


class TestTelling:
    def test_what_a_lookup_finds_is_told(self) -> None:
        world, made = Told(), hashed(1024, BLOCK)
        world.ask(made, 768, heads=2)
        told = world.events.take()
        assert stored(told, PLACE) == made.block_hashes[:4]
        assert stored(told, HOST) == made.block_hashes[4:6]

    def test_what_a_lookup_no_longer_finds_is_told_as_removed(self) -> None:
        world = Told()
        world.ask(hashed(1024, BLOCK, "a"), 1024, heads=4)
        world.events.take()
        again = hashed(1024, BLOCK, "b")
        world.ask(again, 512, heads=2)
        assert removed(world.events.take(), PLACE) == again.block_hashes[4:]

    @pytest.mark.parametrize("how", ["late", "failed", "host only"])
    def test_a_lookup_that_heard_nobody_takes_nothing_back(self, how: str) -> None:
        world = Told()
        world.ask(hashed(1024, BLOCK, "a"), 1024, heads=4)
        world.events.take()
        again = hashed(1024, BLOCK, "b")
        if how == "late":
            world.ask(again, 0, late=True)
        elif how == "failed":
            world.side.arrived(again)
            world.lookups[-1].set_exception(OSError("away"))
            world.side.matched(again, 0)
        else:
            world.side._away_until_s = 1e9
            world.ask(again, 0)
        assert world.events.take() == []

    def test_workers_tell_of_what_was_saved(self) -> None:
        world, made = Told(), hashed(512, BLOCK)
        world.ask(made, 0)
        [save] = world.step(new=[(made, [0, 1, 2, 3], 0, 512)]).saves
        report = LoadReport(changes=tuple(there(list(save.chunks), PLACE)))
        assert report
        world.side.loaded(report)
        assert stored(world.events.take(), PLACE) == made.block_hashes
        world.side.loaded(LoadReport(changes=tuple(there(list(save.chunks), HOST, False))))
        assert world.events.take() == []

    def test_a_load_that_failed_is_told_as_removed(self) -> None:
        world, made = Told(), hashed(1024, BLOCK)
        world.ask(made, 768, heads=3)
        world.side.allocated(made, list(range(8)), 768)
        world.step()
        world.events.take()
        world.side.loaded(LoadReport({"a": 256}, {"a": 256}))
        assert removed(world.events.take(), PLACE) == made.block_hashes[2:6]

    def test_after_a_stop_nothing_is_told_but_that_all_is_gone(self) -> None:
        world, made = Told(), hashed(512, BLOCK)
        world.ask(made, 512, heads=2)
        world.events.take()
        world.side.stop()
        assert removed(world.events.take(), PLACE) == made.block_hashes
        world.side.loaded(LoadReport(changes=tuple(there(chunks_of(made), PLACE))))
        assert world.events.take() == []

    def test_reports_of_ranks_are_joined(self) -> None:
        one, two = Change(b"1", HOST, True), Change(b"2", PLACE, True)
        assert LoadReport(changes=(one,)).joined(LoadReport(changes=(two,))).changes == (one, two)

    def test_tokens_that_the_host_held_are_counted(self) -> None:
        world, made = Told(), hashed(1024, BLOCK)
        world.ask(made, 768, heads=1)
        world.side.allocated(made, list(range(8)), 640)
        assert world.side.host_tokens("a") == 640 - 256
        assert world.side.host_tokens("nobody") == 0


class TestChanges:
    def test_files_are_chunks_by_their_names(self) -> None:
        changes = Changes()
        for name in ("aa00.stream", "bb11.float32", ".aa00.part", "zz.stream"):
            changes.note_file(name, True)
        assert [one.key.hex() for one in changes.take()] == ["aa00", "bb11"]
        assert changes.take() == ()

    def test_the_oldest_are_forgotten(self) -> None:
        changes = Changes(limit=2)
        for number in range(5):
            changes.note_published(bytes([number]))
        assert [one.key for one in changes.take()] == [b"\3", b"\4"]


class Listener:
    def __init__(self, endpoint: str, topic: str) -> None:
        zmq = pytest.importorskip("zmq")
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def take(self, wait_ms: int) -> list[bytes] | None:
        return self.socket.recv_multipart() if self.socket.poll(wait_ms) else None


class TestPublisher:
    @pytest.fixture
    def endpoint(self, tmp_path: Path) -> str:
        pytest.importorskip("zmq")
        return f"ipc://{tmp_path}/events"

    def test_a_subscriber_of_the_topic_gets_numbered_batches(self, endpoint: str) -> None:
        publisher = EventPublisher(endpoint, "kv@pod@model", lambda batch: batch.encode())
        mine, others = Listener(endpoint, "kv@"), Listener(endpoint, "other")
        got, until_s = None, time.monotonic() + 5
        sent = 0
        while got is None and time.monotonic() < until_s:  # until the subscription has arrived
            publisher.publish(f"batch {sent}")
            sent += 1
            got = mine.take(20)
        assert got is not None
        topic, number, batch = got
        assert topic == b"kv@pod@model"
        assert batch.decode() == f"batch {int.from_bytes(number, 'big')}"
        assert others.take(0) is None
        publisher.close()
        for one in (mine, others):
            one.socket.close()

    def test_a_full_queue_drops_the_oldest_and_shows_it(self, endpoint: str) -> None:
        import threading

        go, seen = threading.Event(), []

        def encode(batch: int) -> bytes:
            go.wait(20)
            seen.append(batch)
            return b""

        publisher = EventPublisher(endpoint, "t", encode, max_batches=2)
        began_s = time.monotonic()
        for number in range(100):
            publisher.publish(number)
        assert time.monotonic() - began_s < 10
        go.set()
        publisher.close()
        assert seen[-2:] == [98, 99]
        assert len(seen) <= 4

    def test_an_encoder_that_fails_costs_its_batch_alone(self, endpoint: str) -> None:
        seen = []

        def encode(batch: int) -> bytes:
            seen.append(batch)
            raise ValueError("no")

        publisher = EventPublisher(endpoint, "t", encode)
        publisher.publish(1)
        publisher.publish(2)
        publisher.close()
        assert seen == [1, 2]

    def test_an_address_in_use_is_refused_by_name(self) -> None:
        pytest.importorskip("zmq")
        first = EventPublisher("tcp://*:0", "t", repr)
        port = first.endpoint.rpartition(":")[2]
        with pytest.raises(UnsupportedError, match="events_endpoint"):
            EventPublisher(f"tcp://*:{port}", "t", repr)
        first.close()

    def test_addresses(self) -> None:
        assert is_bound("tcp://*:5557")
        assert is_bound("tcp://0.0.0.0:1")
        assert is_bound("ipc:///x")
        assert not is_bound("tcp://router:5557")
        assert endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
        assert endpoint_of("ipc:///x", 1) == "ipc:///x_dp1"
        assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"

    def test_places_elsewhere_are_told_from_folders(self) -> None:
        assert not Settings.parse({"url": "/data"}).is_remote
        assert Settings.parse({"url": ["/data", "http://x:1"]}).is_remote

    def test_settings(self) -> None:
        given = {"events_endpoint": "tcp://*:1", "events_topic": "kv@a@b"}
        told = Settings.parse({"url": "x", **given})
        assert (told.events_endpoint, told.events_topic) == ("tcp://*:1", "kv@a@b")
        for bad in ("5557", "http://x:1", "tcp://x", 5, ""):
            with pytest.raises(UnsupportedError, match="events_endpoint"):
                Settings.parse({"url": "x", "events_endpoint": bad})
