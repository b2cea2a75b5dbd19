"""What the documents say: their examples run, and their links lead somewhere.

Whole programs are run by `test_readme.py`. Examples that take some names for granted are given
these here. `test_docs_commands.py` holds commands against the command line.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

import kdn
from kdn.cache.keys import cut
from kdn.cache.tensors import KVCache
from kdn.client.metrics import Metrics
from kdn.delivery.endpoints import Endpoint
from kdn.delivery.publish import Publisher, Values
from kdn.delivery.sink import HostSink
from kdn.delivery.spool import Spool
from kdn.session.session import Session
from kdn.session.settings import SessionSettings
from tests.codec.conftest import Tiny
from tests.delivery.world import make_world
from tests.documents import DOCS, DOCUMENTS, anchors, examples, links, name_of
from tests.node.harness import Running, run, with_node
from tests.session.calibrated import calibrate_here
from tests.test_readme import PROGRAMS

RUN_HERE = {"cluster.md": 1, "delivery.md": 2, "observability.md": 1}
COMPILED = {"tutorials/vllm.md": (1, "needs a vLLM server and a model")}
"""How many examples, and why they cannot run."""
TAKEN_FOR_GRANTED = {
    one.__name__: one for one in (HostSink, Publisher, Session, SessionSettings, Spool, Values)
} | {"asyncio": asyncio, "torch": torch}


async def run_example(code: str, **given: Any) -> dict[str, Any]:
    """With `await` at its top level: the names it leaves."""
    names = TAKEN_FOR_GRANTED | given
    compiled = compile(code, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if (running := eval(compiled, names)) is not None:  # something in it is awaited
        await cast(Awaitable[None], running)
    return names


def test_no_example_is_left_out() -> None:
    counts = {name_of(path): len(examples(path, "python")) for path in DOCUMENTS}
    compiled = {name: count for name, (count, _) in COMPILED.items()}
    assert {name: count for name, count in counts.items() if count} == (
        RUN_HERE | compiled | PROGRAMS
    )


@pytest.mark.parametrize("name", COMPILED)
def test_examples_that_cannot_run_compile(name: str) -> None:
    for code in examples(DOCS / name, "python"):
        compile(code, name, "exec")


def test_the_example_of_metrics_registers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    client = SimpleNamespace(metrics=Metrics())
    [code] = examples(DOCS / "observability.md", "python")
    asyncio.run(run_example(code, client=client))
    assert b"kdn_client_answers_total 0.0" in generate_latest(registry)


def test_the_example_of_regions_asks_as_clients_can_be_asked() -> None:
    client = create_autospec(kdn.Client, instance=True)
    asyncio.run(run_example(examples(DOCS / "cluster.md", "python")[0], client=client))
    assert client.ask.call_count == 2


def test_the_example_of_a_session_delivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    tiny, tokens = Tiny.with_layers(4), [i % 250 for i in range(768)]
    calibrate_here(tiny.spec)
    code, address = examples(DOCS / "delivery.md", "python")[0], "http://node:8470"
    hurry = "deadline_s=0.5"  # which a machine that is busy does not keep
    assert address in code
    assert hurry in code

    async def test(node: Running) -> None:
        async with Session(SessionSettings((node.url,)), tiny.spec, torch.float16) as session:
            chunks = cut(tokens, session.namespace)
            parts = [tiny.cache(chunk, torch.float16) for chunk in chunks]
            cache = KVCache(
                *(torch.cat([getattr(p, n) for p in parts], 1) for n in ("keys", "values"))
            )
            for chunk in chunks[:2]:
                session.publish(chunk, Values(cache), exact_until=None)
            assert await session.publisher.flush(60.0)
        left = await run_example(
            code.replace(address, node.url).replace(hurry, "deadline_s=20.0"),
            spec=tiny.spec,
            tokens=tokens,
            chunk=chunks[2],
            cache=cache,
        )
        assert left["got"].ready_until == 512
        assert left["sink"].cache.end == 512

    with_node(tmp_path / "node", test)


def test_the_example_of_publishing_publishes(tmp_path: Path) -> None:
    world = make_world(1)
    code = examples(DOCS / "delivery.md", "python")[1]

    async def test() -> None:
        store = await world.store([])
        await run_example(
            code, root=tmp_path, max_bytes=1 << 20, node=Endpoint(store), codec=world.codec,
            chunk=world.chunks[0], cache=world.caches[0],
        )  # fmt: skip
        [entry] = await store.lookup([world.chunks[0].key])
        assert entry is not None
        assert entry.hints.saved_s == 0.4

    run(test())


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    """Headings have to be found on GitHub and on the site."""
    wrong = []
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        is_there = target.exists() and (not anchor or all(anchor in one for one in anchors(target)))
        if not is_there:
            wrong.append(link)
    assert wrong == []


def test_links_and_headings_are_found(tmp_path: Path) -> None:
    """So that the test above can fail."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` & C\n\n[one](other.md#x), [web](https://host/x), `[no](no.md)`\n"
        '<img src="picture.svg">\n\n```sh\n# no heading [no](no.md)\n```\n\n## D e\n\n## D e\n'
    )
    assert links(page) == ["other.md#x", "picture.svg"]
    assert anchors(page) == ({"a-b--c", "d-e", "d-e-1"}, {"a-b-c", "d-e", "d-e_1"})
    assert links(DOCS.parent / "README.md")
