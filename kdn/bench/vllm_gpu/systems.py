"""What is compared on a GPU: engines that find the same prompts in different places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdn.bench.vllm_engine import engine_environ
from kdn.bench.vllm_gpu.streams import QUALITIES, Drawn

LOOPBACK = "loopback"
LINKS: dict[str, int | None] = {
    LOOPBACK: None, "1 Gbit/s": 10**9, "10 Gbit/s": 10**10, "25 Gbit/s": 25 * 10**9,
    "100 Gbit/s": 10**11,
}  # fmt: skip
"""Name to bits a second, of which the node's egress limit makes a link."""
CPU_BYTES = 12 << 30
"""What the others get of main memory: more than all prompts take."""
HOST_BYTES = 4 << 30
"""What kdn gets."""
DEADLINE_S = 120.0
"""The first load compiles kernels."""
GPU_SHARE, BLOCKS = 0.5, 12288
"""Of the GPU's memory, for weights and blocks; and how many blocks of 16 tokens: all engines take
the same for them."""
NONE, OFFLOADING, LMCACHE = "no cache", "vLLM offloading", "LMCache"
HOST, NODE = "kdn, host memory", "kdn, node"
NODE_FETCHER = "kdn, node, received by a process of its own"
CONNECTIONS = 6


@dataclass(frozen=True)
class System:
    """How an engine is started."""

    name: str
    transfer: Mapping[str, Any] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    prefix_caching: bool = False
    """Whether vLLM's own prefix cache is on: the others' keys rest on it. Then it is emptied before
    every prompt."""

    def settings(
        self, model: Path, max_tokens: int, device: str, graphs: bool = False
    ) -> dict[str, Any]:
        """For the worker. `graphs`: steps of few tokens are recorded and replayed, as vLLM does by
        default (there with compiled pieces, which take a minute to make); longer ones stay as in
        eager mode."""
        own: dict[str, Any] = {"dtype": "float32"}
        if device.startswith("cuda"):
            own = {
                "dtype": "bfloat16", "gpu_memory_utilization": GPU_SHARE,
                "num_gpu_blocks_override": BLOCKS,
                "attention_config": {"backend": "FLASH_ATTN"},
            }  # fmt: skip
        engine = {
            "model": str(model), "max_model_len": max_tokens,
            "enable_prefix_caching": self.prefix_caching,
            "disable_hybrid_kv_cache_manager": True, "enforce_eager": not graphs, **own,
        }  # fmt: skip
        if graphs:
            engine["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL"}
            engine["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 24, 32]
        return {"engine": engine, "transfer": self.transfer}


def no_cache() -> System:
    return System(NONE)


def offloading() -> System:
    """vLLM's own: blocks as they are, in pinned main memory."""
    extra = {"cpu_bytes_to_use": CPU_BYTES}
    return System(OFFLOADING, _transfer("OffloadingConnector", extra), prefix_caching=True)


def lmcache() -> System:
    """Chunks of 256 tokens as they are, in pinned main memory of the engine's own process."""
    environ = {
        "LMCACHE_CHUNK_SIZE": "256", "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(CPU_BYTES >> 30), "PYTHONHASHSEED": "0",
    }  # fmt: skip
    return System(LMCACHE, _transfer("LMCacheConnectorV1", {}), environ, prefix_caching=True)


def kdn(
    name: str, url: str, drawn: Drawn, host: Path | None, connections: int | None = None
) -> System:
    """Asks for two levels unless a request wants more: requests may only be stricter.
    `connections`: of a process that receives for it, where that is not kdn's own choice."""
    extra: dict[str, Any] = {
        "url": url, "profile": str(drawn.profile_file), "quality": QUALITIES[2],
        "deadline_s": DEADLINE_S, "lookup_s": 5.0, "spool_bytes": 0, "host_bytes": 0,
    }  # fmt: skip
    if connections is not None:
        extra["fetch_connections"] = connections
    if host is not None:
        extra |= {"host_folder": str(host), "host_bytes": HOST_BYTES}
    transfer = _transfer("KdnConnector", extra)
    return System(name, transfer | {"kv_connector_module_path": "kdn.engines.vllm"})


def _transfer(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def environ_of(system: System, threads: int) -> dict[str, str]:
    """Everything in one process, nothing beyond loopback."""
    return {
        **engine_environ(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        **system.environ,
    }
