"""What the documents say: their examples run, and their links lead somewhere.

The examples of README and quick start are whole programs, run by `test_readme.py`. Those of
`delivery.md` take some names for granted, which are given to them here.
"""

from __future__ import annotations

import ast
import asyncio
import re
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
from tests.node.harness import Running, run, with_node
from tests.session.calibrated import calibrate_here

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TAKEN_FOR_GRANTED = {
    one.__name__: one for one in (HostSink, Publisher, Session, SessionSettings, Spool, Values)
} | {"asyncio": asyncio, "torch": torch}


def examples(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


async def run_example(code: str, **given: Any) -> dict[str, Any]:
    """With `await` at its top level: the names it leaves."""
    names = TAKEN_FOR_GRANTED | given
    compiled = compile(code, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if (running := eval(compiled, names)) is not None:  # something in it is awaited
        await cast(Awaitable[None], running)
    return names


def test_no_example_is_left_out() -> None:
    counts = {path.name: len(examples(path)) for path in DOCUMENTS if examples(path)}
    assert counts == {
        "README.md": 1, "quickstart-transformers.md": 3, "delivery.md": 2, "cluster.md": 1,
        "blending.md": 1, "observability.md": 1,
    }  # fmt: skip


def test_the_example_of_metrics_registers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    client = SimpleNamespace(metrics=Metrics())
    asyncio.run(run_example(examples(ROOT / "docs" / "observability.md")[0], client=client))
    assert b"kdn_client_answers_total 0.0" in generate_latest(registry)


def test_the_example_of_regions_asks_as_clients_can_be_asked() -> None:
    client = create_autospec(kdn.Client, instance=True)
    asyncio.run(run_example(examples(ROOT / "docs" / "cluster.md")[0], client=client))
    assert client.ask.call_count == 2


def test_the_example_of_a_session_delivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    tiny, tokens = Tiny.with_layers(4), [i % 250 for i in range(768)]
    calibrate_here(tiny.spec)
    code, address = examples(ROOT / "docs" / "delivery.md")[0], "http://node:8470"
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
    code = examples(ROOT / "docs" / "delivery.md")[1]

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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_that_exist(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_readme_has_links() -> None:
    assert "](docs/" in (ROOT / "README.md").read_text()
