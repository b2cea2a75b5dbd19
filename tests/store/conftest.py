"""Options and fixtures of the store tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="tests/store: 50 kills, every state of the index"
    )


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether the long versions of the crash tests were asked for."""
    return bool(request.config.getoption("thorough", default=False))
