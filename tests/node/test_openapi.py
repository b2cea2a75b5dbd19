"""The OpenAPI document against the node: schemathesis asks, the node must answer as it says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from kdn.node.app import ROUTES
from kdn.node.openapi import document
from tests.node.harness import config_for, running

EXAMPLES = 25
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance, negative_data_rejection,
]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node in a thread of its own."""
    ready, stop, found = Event(), Event(), [""]

    async def serve(folder: Path) -> None:
        async with running(config_for(folder)) as node:
            await node.put_chunk(1)
            found[0] = node.url
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    folder = tmp_path_factory.mktemp("openapi")
    thread = Thread(target=lambda: asyncio.run(serve(folder)))
    thread.start()
    assert ready.wait(20)
    yield found[0]
    stop.set()
    thread.join(20)


def test_every_route_is_in_the_document() -> None:
    told = {
        (method.upper(), path)
        for path, operations in document()["paths"].items()
        for method in operations
    }
    served = {(method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)) for method, path, *_ in ROUTES}
    assert told == served


def operations() -> list[Any]:
    generation = GenerationConfig(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    projects = ProjectsConfig(default=ProjectConfig(generation=generation))
    config = SchemathesisConfig(projects=projects)
    schema = schemathesis.openapi.from_dict(document(), config=config)
    return [found.ok() for found in schema.get_all_operations()]


def cases() -> list[Any]:
    """Each operation asked rightly, and wrongly where there is anything to get wrong."""
    found = []
    for operation in operations():
        if operation.path == "/v1/status/events":  # has no end; tests/node/test_status.py listens
            continue
        told = document()["paths"][operation.path][operation.method]
        name = f"{operation.method} {operation.path}"
        found.append(pytest.param(operation, GenerationMode.POSITIVE, id=f"right {name}"))
        if "parameters" in told or "requestBody" in told:
            found.append(pytest.param(operation, GenerationMode.NEGATIVE, id=f"wrong {name}"))
    return found


@pytest.mark.parametrize(("operation", "mode"), cases())
def test_the_node_answers_as_the_document_says(operation: Any, mode: Any, url: str) -> None:
    @seed(7)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=10)

    ask()
