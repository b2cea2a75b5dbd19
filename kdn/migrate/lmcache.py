"""`kdn import lmcache-config`: LMCache's settings as kdn's, and what has no counterpart and why.

The result is a `kdn.toml` for a node, and what vLLM is given to use it. Where LMCache keeps values
as they are (its serde `naive`), so does the result (the codec `exact`): it needs no profile, and
answers stay the same. docs/from-lmcache.md has the whole table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdn.checked import checked_client, shown
from kdn.errors import UnsupportedError
from kdn.migrate.lmcache_stores import remote_of

LOCAL_NODE = "http://127.0.0.1:8470"
GIB = 1 << 30
MAX_GIB = 1 << 20
POLICIES = {"lru": "lru"}
LOSSY = ("cachegen", "kivi")


@dataclass
class Plan:
    """What was understood so far."""

    node: dict[str, Any] = field(default_factory=dict)
    """Settings of `[node]`."""
    engine: dict[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`."""
    role: str = "kv_both"
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(LMCache's setting, what is to be known about it)."""

    def note(self, name: str, why: str) -> None:
        self.notes.append((name, why))


Rule = Callable[[Plan, str, Any], None]


def translate(settings: Mapping[str, Any]) -> Plan:
    """Never fails for what the settings say: what cannot be used is noted by name."""
    plan, extra = Plan(), settings.get("extra_config")
    extra = extra if isinstance(extra, Mapping) else {}
    _serde(plan, "remote_serde", settings.get("remote_serde", "naive"))
    for name, value in settings.items():
        rule = RULES.get(name) or _by_prefix(name)
        if name == "remote_serde":
            continue
        if name == "remote_url":
            _remote_url(plan, value, extra)
        elif name == "extra_config":
            _extra(plan, value)
        elif rule is None:
            plan.note(name, "kdn does not know this setting of LMCache")
        else:
            try:
                rule(plan, name, value)
            except UnsupportedError as error:
                plan.note(name, f"left out: {error}")
    plan.engine = {"url": plan.engine.pop("url", LOCAL_NODE), **plan.engine}
    if settings.get("local_cpu") is False:
        plan.engine["host_bytes"] = 0
    return plan


# Rules: what one setting becomes.


def _number(name: str, value: Any, most: float) -> float:
    number = None if isinstance(value, bool) else value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if not isinstance(number, int | float) or not math.isfinite(number) or not 0 <= number <= most:
        raise UnsupportedError(f"{name}: expected 0 to {most:g}, found {shown(value)}")
    return float(number)


def _remote_url(plan: Plan, url: Any, extra: Mapping[str, Any]) -> None:
    remote = remote_of(url, extra)
    if remote.store:
        plan.node["store"] = remote.store
    if remote.node:
        plan.engine["url"] = remote.node
    for why in remote.notes:
        plan.note("remote_url", why)


def _extra(plan: Plan, value: Any) -> None:
    if not isinstance(value, Mapping):
        plan.note("extra_config", "expected settings of its own, found something else")
        return
    used = ("s3_region", "disable_tls", "azure_account_url", "valkey_mode")
    for name in value:
        if name in used:
            continue
        secret = any(word in str(name) for word in ("key", "token", "password", "connection"))
        why = _SECRET if secret else "settings of LMCache's stores; kdn's have URL options"
        plan.note(f"extra_config.{str(name)[:60]}", why)


_SECRET = "credentials stay out of files: see store_token_file, and the cloud's environment"


def _cpu_size(plan: Plan, name: str, value: Any) -> None:
    plan.engine["host_bytes"] = int(_number(name, value, MAX_GIB) * GIB)
    plan.note(name, "kdn's memory is shared by all engines of a host, LMCache's is each engine's")


def _local_cpu(plan: Plan, name: str, value: Any) -> None:
    if value is False:
        plan.note(name, "false: chunks are not kept in the host's memory (host_bytes is 0)")


def _local_disk(plan: Plan, name: str, value: Any) -> None:
    if value is True or not isinstance(value, str) or not value.strip():
        plan.note(name, "expected a folder")
        return
    first, *others = [part.strip().removeprefix("file://") for part in value.split(",")]
    plan.node["data"] = first.rstrip("/") + "/kdn"
    plan.note(name, "a node on this host keeps chunks there: run `kdn node` with this file")
    if others:
        plan.note(name, f"a node has one folder: {len(others)} more are left out (use RAID or LVM)")


def _disk_size(plan: Plan, name: str, value: Any) -> None:
    if size := int(_number(name, value, MAX_GIB) * GIB):
        plan.node["disk_bytes"] = size


def _serde(plan: Plan, name: str, value: Any) -> None:
    if value in LOSSY:
        plan.engine["quality"] = "default"
        plan.note(name, "the codec klt takes its place; it needs a profile (`kdn calibrate MODEL`)")
    else:
        plan.engine["codec"] = "exact"
        plan.note(
            name,
            '"codec": "exact" loses nothing, as in LMCache, and sends many bytes. With a profile '
            "(`kdn calibrate MODEL`), leave it out: klt sends far less",
        )


def _policy(plan: Plan, name: str, value: Any) -> None:
    policy = POLICIES.get(str(value).lower())
    if policy:
        plan.node["policy"] = policy
        plan.note(
            name, "kdn's default, cost, weighs what a chunk saves: try it (`kdn bench cache`)"
        )
    else:
        plan.note(
            name, f"there is no {shown(value)}; kdn has cost (the default), lru, s3fifo, graded"
        )


def _chunk_size(plan: Plan, name: str, value: Any) -> None:
    if value != 256:
        plan.note(name, "kdn's chunks always have 256 tokens; the end of a prompt is stored, too")


def _blending(plan: Plan, name: str, value: Any) -> None:
    if value is True:
        plan.engine["blend"] = "auto"
        plan.note(
            name,
            "run `kdn seams` first: pieces are joined if its report is within join_kld. In vLLM "
            "seams are the only repair; no token is recomputed",
        )


def _separator(plan: Plan, name: str, value: Any) -> None:
    if isinstance(value, str) and value:
        plan.note(
            name,
            '"blend": "auto" needs no separator. To mark pieces: "blend": "separator", '
            f'"separator": {json.dumps(value[:40])}',
        )


def _lookup(plan: Plan, name: str, value: Any) -> None:
    plan.engine["lookup_s"] = max(0.001, _number(name, value, 3_600_000) / 1000)


def _blocking(plan: Plan, name: str, value: Any) -> None:
    plan.engine["deadline_s"] = max(0.001, _number(name, value, 3600))


def _instance(plan: Plan, name: str, value: Any) -> None:
    plan.engine["client"] = checked_client(value)


def _events(plan: Plan, name: str, value: Any) -> None:
    if value is True:
        plan.note(name, "with vLLM's --kv-events-config kdn adds its own, or set events_endpoint")


def _pd_role(plan: Plan, name: str, value: Any) -> None:
    roles = {"sender": "kv_producer", "receiver": "kv_consumer"}
    plan.role = roles.get(str(value), "kv_both")
    plan.note(name, f"as {plan.role}: engines publish and load through the node, not directly")


def because(why: str) -> Rule:
    """A setting without a counterpart."""

    def rule(plan: Plan, name: str, value: Any) -> None:
        if value is not False:
            plan.note(name, why)

    return rule


_ALWAYS = "nothing to set: kdn always does this"
_NONE = "no counterpart"
RULES: Mapping[str, Rule] = {
    "chunk_size": _chunk_size,
    "local_cpu": _local_cpu,
    "max_local_cpu_size": _cpu_size,
    "local_disk": _local_disk,
    "max_local_disk_size": _disk_size,
    "cache_policy": _policy,
    "enable_blending": _blending,
    "blend_special_str": _separator,
    "lookup_timeout_ms": _lookup,
    "blocking_timeout_secs": _blocking,
    "lmcache_instance_id": _instance,
    "enable_kv_events": _events,
    "pd_role": _pd_role,
    "save_decode_cache": because(
        f"{_ALWAYS}; what an engine computes while answering is published"
    ),
    "save_unfull_chunk": because(f"{_ALWAYS}, to a multiple of 16 tokens"),
    "enable_async_loading": because(_ALWAYS),
    "use_layerwise": because("kdn decodes chunk by chunk while others are on their way"),
    "pre_caching_hash_algorithm": because("keys are keyed BLAKE2b, equal in every process"),
    "store_location": because(f"{_NONE}: new chunks go to the node, and to the host's memory"),
    "retrieve_locations": because(f"{_NONE}: the host's memory is asked first, then the node"),
    "min_retrieve_tokens": because(f"{_NONE}: any known block is loaded, within the deadline"),
    "hit_miss_ratio": because(_NONE),
    "priority_limit": because(f"{_NONE}: a request may turn publishing off for itself"),
    "external_lookup_client": because(f"{_NONE}: the node is asked"),
    "enable_scheduler_bypass_lookup": because(f"{_NONE}: lookups run beside the scheduler"),
    "audit_actual_remote_url": because(f"{_NONE}: a node counts requests (/metrics)"),
    "enable_controller": because(f"{_NONE}: nodes need no coordinator"),
    "enable_p2p": because(f"{_NONE}: engines meet at a node; those of a host share memory"),
    "enable_pd": because("kdn hands caches on through the node, not from GPU to GPU (no RDMA)"),
    "transfer_channel": because(f"{_NONE}: HTTP, Redis or an object store"),
    "py_enable_gc": because(_NONE),
    "app_id": because(f"{_NONE}: there is no configuration service"),
    "remote_config_url": because(f"{_NONE}: there is no configuration service"),
    "storage_plugins": because("kdn loads no code of others as a store"),
    "remote_storage_plugins": because("kdn loads no code of others as a store"),
    "run_script_api_enabled": because("a node runs no scripts of others"),
    "script_allowed_imports": because("a node runs no scripts of others"),
    "use_gpu_connector_v3": because(_NONE),
    "mp_host": because("a node takes the place of LMCache's server: set url"),
    "mp_port": because("a node takes the place of LMCache's server: set url"),
    "lookup_server_worker_ids": because(_NONE),
}
PREFIXES: Mapping[str, str] = {
    "blend_": "in vLLM, seams repair joins; recomputing is for transformers (recompute_share)",
    "pd_": "engines publish and load through the node; there is nothing to hand over",
    "p2p_": "engines meet at a node",
    "nixl_": "there is no RDMA transfer",
    "gds_": "there is no GPUDirect storage: streams are small, and decoded on the GPU",
    "use_gds": "there is no GPUDirect storage: streams are small, and decoded on the GPU",
    "maru_": "there is no CXL memory store",
    "controller_": "nodes need no coordinator",
    "lmcache_worker": "nodes need no coordinator",
    "internal_api_server": "see /metrics and /healthz of the node, and vLLM's own metrics",
    "lazy_memory_": "the host's memory is files of a tmpfs: it grows with what is in it",
    "enable_lazy_memory": "the host's memory is files of a tmpfs: it grows with what is in it",
    "local_cpu_use_hugepages": "the host's memory is files of a tmpfs",
    "reserve_local_cpu_size": "a quarter of the tmpfs (or 16 GiB) always stays free",
    "local_disk_path_sharding": "a node has one folder, for all GPUs",
    "numa_mode": "there is nothing to pin",
    "pin_": "there is nothing to pin",
    "chunk_statistics": "`kdn bench cache` replays a log of requests",
    "enable_chunk_statistics": "`kdn bench cache` replays a log of requests",
    "runtime_plugin": "kdn loads no plugins",
    "enable_hidden_state": "hidden states are not stored",
    "hidden_state": "hidden states are not stored",
    "max_hidden_state": "hidden states are not stored",
    "ec_": "encoder caches are not stored",
}


def _by_prefix(name: str) -> Rule | None:
    return next((because(why) for start, why in PREFIXES.items() if name.startswith(start)), None)
