"""The vLLM tests run where vLLM is installed: `make test-vllm` sees to that."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.harness import Node, running_node


@pytest.fixture(autouse=True, scope="session")
def _needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run `make test-vllm`")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, _needs_vllm: None) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("node") / "data") as node:
        yield node


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")
