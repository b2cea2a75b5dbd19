"""Reads from Redis beside raw ones."""

from __future__ import annotations

import asyncio

from kdn.bench.redis_reads import measure_redis_reads
from kdn.bench.servers import RedisClusterServers, RedisServer


def test_measures_both_in_turns(
    redis_server: RedisServer, redis_cluster: RedisClusterServers
) -> None:
    for url in (redis_server.url, redis_cluster.url):
        reads = asyncio.run(measure_redis_reads(url, num_chunks=8, chunk_bytes=100_000, rounds=3))
        assert reads.size_bytes == 800_000
        assert len(reads.ratios()) == len(reads.lookup_s) == 3
        assert all(ratio > 0 for ratio in reads.ratios())
