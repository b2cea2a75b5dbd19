"""What a region says of names: how old it may be, and when it must not say anything."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kdn.depot import sqlite_names
from kdn.depot.names import Version
from kdn.errors import CentreAwayError, KdnError
from kdn.places.names import NodeNames
from kdn.region.names_copy import NamesCopy, Newest
from tests.node.harness import config_for, run, tenant
from tests.region.regions import (
    centre_and_link,
    depot_of,
    following,
    names_at,
    region,
    sent,
    until,
    whole,
)


async def write(names: NodeNames, name: str, value: Any) -> None:
    await names.change(name, lambda _: {"value": value})


async def read(names: NodeNames, name: str, **how: bool) -> Any:
    found = await names.get(name, **how)
    return found.manifest["value"] if found else None


def test_the_feed_brings_changes_and_reads_stay_here(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link) as node,
            names_at(centre, node) as (there, here),
        ):
            await write(there, "news", 1)
            await following(node)
            assert await read(here, "news") == 1
            view = depot_of(node).names._copy.view("public")  # type: ignore[attr-defined]
            await write(there, "news", 2)
            await until(lambda: view.names["news"].version == 2)
            assert await read(here, "news") == 2
            before = link.up_bytes
            for _ in range(20):
                assert await read(here, "news") == 2
                assert await read(here, "nothing") is None
            assert link.up_bytes == before  # not one question
            await there.delete("news")
            await until(lambda: "news" not in view.names)
            assert await read(here, "news") is None
            await write(there, "news", 3)  # version 1 again
            assert await read(here, "news", latest=True) == 3

    run(work())


def test_an_answer_that_the_feed_overtook_is_not_kept(tmp_path: Path) -> None:
    def about(version: int) -> Version:
        return Version("news", version, f"e{version}", 0.0, 2)

    async def work() -> None:
        copy = NamesCopy(tmp_path / "r.sqlite", "http://centre")
        view = copy.view("t")
        view.position, view.names = 7, {}  # the feed told at 7 that it was deleted
        for sequence in (6, 7):
            await copy.keep("t", about(3), b"{}", sequence)
            assert "news" not in view.held
            assert await copy.manifest("t", about(3)) is None
        view.names = {"news": Newest("news", 4, "e4")}
        await copy.keep("t", about(3), b"{}", 7)
        assert "news" not in view.held
        await copy.keep("t", about(4), b"{}", 7)
        assert view.held["news"] == about(4)
        keeping = asyncio.create_task(copy.keep("t", about(1), b"{}", 9))
        await asyncio.sleep(0)
        assert view.held.pop("news") == about(1)  # a deletion that is told now finds it
        await copy.write("t", [Newest("news", 1, None)], 9, 0.0)
        await keeping
        assert "news" not in view.held
        assert await copy.manifest("t", about(1)) is None
        await copy.close()

    run(work())


def test_force_latest_and_what_a_cut_does(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link, max_stale_s=0.4, upstream_timeout_s=0.5) as node,
            names_at(centre, node) as (there, here),
        ):
            for value in range(10):
                await write(there, "news", value)
                assert await read(here, "news", latest=True) == value
            await following(node)
            for way in (link.cut, link.hold):
                way()
                began_s = time.monotonic()
                with pytest.raises(CentreAwayError):
                    await read(here, "news", latest=True)
                assert time.monotonic() - began_s < 8.0
                found = await here.get("news", latest=True, stale_ok=True)
                assert found is not None
                assert found.manifest["value"] == 9
                assert found.stale_s is not None
                await asyncio.sleep(0.5)  # a default read may not be older either
                with pytest.raises(CentreAwayError):
                    await read(here, "news")
                found = await here.get("news", stale_ok=True)
                assert found is not None
                assert found.stale_s is not None
                assert found.stale_s >= 0.4
                with pytest.raises(KdnError):  # nothing is written here alone
                    await write(here, "news", "lost?")
                link.mend()
                await until(lambda: link.connections > 0)
                assert await read(here, "news", latest=True) == 9

    run(work(), 60)


def test_a_heartbeat_that_was_held_back_does_not_count_as_new(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link, max_stale_s=0.8) as node,
            names_at(centre, node) as (there, here),
        ):
            await write(there, "news", 1)
            await following(node)
            assert await read(here, "news") == 1
            [feed] = depot_of(node).names._following.values()  # type: ignore[attr-defined]
            link.hold()
            await asyncio.sleep(1.5)
            assert feed.age_s > 1.4
            await write(there, "news", 2)
            link.mend()
            assert await read(here, "news") == 2

    run(work())


def test_a_client_that_changes_regions_never_sees_older(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "a", centre) as a,
            region(tmp_path / "b", link, max_stale_s=60.0) as b,
            names_at(centre, a, b) as (there, at_a, at_b),
        ):
            await write(there, "news", 1)
            await following(b)
            assert await read(at_b, "news") == 1
            # The feed of b is late: as its limit is far, it goes on with what it knows.
            depot_of(b).names._following["public"]._hear = _hear_nothing  # type: ignore[attr-defined]
            await write(at_a, "news", 2)
            assert await read(at_b, "news") == 1
            at_b.seen = at_a.seen  # the client of a comes here
            assert await read(at_b, "news") == 2
            await at_a.delete("news")
            at_b.seen = at_a.seen
            assert await read(at_b, "news") is None

    async def _hear_nothing(line: bytes, sent_s: float) -> None:
        """It is on its way."""

    run(work())


def test_writes_race_in_two_regions(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "a", link) as a,
            region(tmp_path / "b", centre) as b,
            names_at(a, b, a, b) as clients,
        ):

            async def count(names: NodeNames, who: int) -> None:
                for _ in range(5):
                    await names.change("sum", lambda old: {"n": old.get("n", 0) + 1, "by": who})

            await asyncio.gather(*map(count, clients, range(4)))
            for names in clients:
                found = await names.get("sum", latest=True)
                assert found is not None
                assert found.manifest["n"] == 20
                assert found.version == 20

    run(work())


def test_a_region_that_missed_too_much_lists_all_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_names, "MAX_CHANGES", 10)

    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            names_at(centre) as (there,),
        ):
            await write(there, "gone", 0)
            await write(there, "stays", 0)
            async with region(tmp_path / "r", link) as node, names_at(node) as (here,):
                await following(node)
                assert await read(here, "gone") == 0
            await there.delete("gone")
            for value in range(1, 30):
                await write(there, "stays", value)
            async with region(tmp_path / "r", link) as node, names_at(node) as (here,):
                await following(node)
                [feed] = depot_of(node).names._following.values()  # type: ignore[attr-defined]
                assert feed.times_renewed == 1
                view = depot_of(node).names._copy.view("public")  # type: ignore[attr-defined]
                assert set(view.names) == {"stays"}
                assert await read(here, "gone") is None
                assert await read(here, "stays") == 29

    run(work())


def test_after_a_restart_nothing_old_is_told_and_the_feed_goes_on(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            names_at(centre) as (there,),
        ):
            await write(there, "news", 1)
            async with region(tmp_path / "r", link) as node, names_at(node) as (here,):
                await following(node)
                assert await read(here, "news") == 1
            await write(there, "news", 2)
            link.hold()  # it may not even find out
            async with region(
                tmp_path / "r", link, upstream_timeout_s=0.5, max_stale_s=100.0
            ) as node, names_at(node) as (here,):  # fmt: skip
                with pytest.raises(CentreAwayError):
                    await read(here, "news")
                link.mend()
                await following(node)
                assert await read(here, "news") == 2
                [feed] = depot_of(node).names._following.values()  # type: ignore[attr-defined]
                assert feed.times_renewed == 0

    run(work())


def test_a_name_may_be_called_changes_and_a_region_is_no_upstream(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link) as node,
            names_at(node) as (here,),
        ):
            await write(here, "changes", "a name")
            assert await read(here, "changes") == "a name"
            for after, status in (("x", 400), ("1", 410)):
                answer = await centre.ask("GET", f"/v1/names/changes?after={after}")
                assert answer[0] == status
            assert int(answer[1]["Kdn-Sequence"]) > 1
            assert (await node.ask("GET", "/v1/names/changes?after=1"))[0] == 503

    run(work())


def test_names_wait_a_little_for_their_chunks(tmp_path: Path) -> None:
    """Learned in one region, found in the other: the chunks before the name."""

    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "a", link) as a,
            region(tmp_path / "b", centre) as b,
            names_at(a, b) as (at_a, at_b),
        ):
            streams = [await a.put_chunk(number) for number in range(8)]
            keys = [number.to_bytes(16, "big").hex() for number in range(8)]
            manifest = {"models": {"ab": {"chunks": keys}}}
            assert await at_a.put("doc", manifest, None)
            found = await at_b.get("doc", latest=True)
            assert found is not None
            for key, stream in zip(found.manifest["models"]["ab"]["chunks"], streams, strict=True):
                assert (await b.ask("GET", f"/v1/chunks/{key}"))[::2] == (200, stream)
            # Deleted here with its chunks, gone there as well, also what b has copied.
            await sent(a)
            report = await at_a.delete("doc")
            assert report is not None
            assert sorted(report["deleted"]) == keys
            store = depot_of(b).region
            await until(lambda: not store.usage(b"").objects)
            assert (await b.ask("GET", f"/v1/chunks/{keys[0]}"))[0] == 404

    run(work())


def test_a_folder_that_followed_another_centre_begins_anew(tmp_path: Path) -> None:
    async def work() -> None:
        for number in (1, 2):
            async with (
                centre_and_link(tmp_path / f"centre{number}") as (centre, _),
                region(tmp_path / "r", centre) as node,
                names_at(centre, node) as (there, here),
            ):
                await write(there, f"of{number}", number)
                await following(node)
                assert await read(here, f"of{number}", latest=True) == number
                assert await read(here, f"of{3 - number}") is None

    run(work())


def test_a_feed_tells_nothing_of_other_tenants(tmp_path: Path) -> None:
    """Not what they change, nor when, nor how often."""

    async def work() -> None:
        config = config_for(tmp_path, tenant("ann", "a"), tenant("bob", "b"))
        async with whole(config) as node:
            put = partial(node.ask, "PUT", data=b"{}")
            assert (await put("/v1/names/mine", token="b"))[0] == 201
            answer = await node.ask("GET", "/v1/names/changes?after=0", token="b")
            own = int(answer[1]["Kdn-Sequence"])
            assert answer[0] == 410
            sent = {"Authorization": "Bearer b"}
            url = f"{node.url}/v1/names/changes?after={own}"
            async with node.session.get(url, headers=sent) as feed:
                lines = [json.loads(await feed.content.readline())]
                began_s = time.monotonic()
                for number in range(6):
                    await put(f"/v1/names/n{number}", token="a")
                    await asyncio.sleep(0.1)
                lines.append(json.loads(await feed.content.readline()))
                assert time.monotonic() - began_s > 0.7  # the usual time
                assert [one["sequence"] for one in lines] == [own, own]
                assert all(one.keys() == {"sequence", "age_s"} for one in lines)
                await put("/v1/names/mine", token="b")
                change, beat = [json.loads(await feed.content.readline()) for _ in range(2)]
                assert (change["name"], change["version"]) == ("mine", 2)
                assert beat["sequence"] == change["sequence"] > own
            for other in range(own + 1, change["sequence"]):  # of ann: as if there were none
                answer = await node.ask("GET", f"/v1/names/changes?after={other}", token="b")
                assert answer[0] == 410

    run(work())


def test_a_feed_ends_when_its_store_has_lost_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with (
            centre_and_link(tmp_path / "centre") as (centre, link),
            region(tmp_path / "r", link) as node,
            names_at(centre, node) as (there, _),
        ):
            await write(there, "news", 1)
            await following(node)
            feed, names = centre.node.feed, centre.node.depot.names
            assert feed.times_back == 0
            last, listened = await names.sequence(), link.up_bytes

            async def lost() -> int:
                return last - 1

            with monkeypatch.context() as patch:
                patch.setattr(names, "sequence", lost)
                await until(lambda: feed.times_back == 1)
            await until(lambda: link.up_bytes > listened)  # the region asks anew
            await write(there, "news", 2)
            view = depot_of(node).names._copy.view("public")  # type: ignore[attr-defined]
            await until(lambda: view.names["news"].version == 2)

    run(work())
