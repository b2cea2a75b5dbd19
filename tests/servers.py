"""Real servers for tests: started once for all who ask, skipped with a reason where missing.

How each is started is `kdn/bench/servers.py`. Whoever gets one that others use too takes care of
what it finds there: `emptied` removes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import pytest

from kdn.bench import s3_servers, servers
from kdn.bench.s3_servers import S3Server
from kdn.bench.servers import MissingError, RedisClusterServers, RedisServer, SentinelServers

T = TypeVar("T")
NEEDS_REDIS = pytest.mark.usefixtures("redis_server")
"""Of a test that starts one of its own: skipped where there is none."""


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with ExitStack() as stack:
        yield started(stack, lambda: servers.redis_server(folder))


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("valkey")
    with ExitStack() as stack:
        yield started(stack, lambda: servers.valkey_server(folder))


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterServers]:
    """Three masters with a replica each, whole again after each test that breaks it."""
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        yield started(stack, lambda: servers.redis_cluster(folder))


@pytest.fixture(scope="module")
def redis_sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelServers]:
    folder = tmp_path_factory.mktemp("sentinel")
    with ExitStack() as stack:
        yield started(stack, lambda: servers.redis_sentinel(folder, down_after_ms=500))


def started(stack: ExitStack, server: Callable[[], AbstractContextManager[T]]) -> T:
    """Until the stack ends."""
    try:
        return stack.enter_context(server())
    except MissingError as error:
        pytest.skip(str(error))


def emptied(*each: RedisServer) -> None:
    """Of all keys; replicas empty themselves after their masters."""
    for server in each:
        server.ask("FLUSHALL")


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """It takes no conditions."""
    folder = tmp_path_factory.mktemp("rclone")
    with ExitStack() as stack:
        yield started(stack, lambda: s3_servers.rclone_s3(folder))


@pytest.fixture(scope="session")
def rclone_s3_as_it_is(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Its ranges are refused by clients, too."""
    folder = tmp_path_factory.mktemp("rclone-as-it-is")
    with ExitStack() as stack:
        yield started(stack, lambda: s3_servers.rclone_s3(folder, as_it_is=True))


@pytest.fixture(scope="session")
def moto_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """It keeps to conditions."""
    folder = tmp_path_factory.mktemp("moto")
    with ExitStack() as stack:
        yield started(stack, lambda: s3_servers.moto_s3(folder))


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for all of these."""
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
