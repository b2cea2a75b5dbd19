"""Events in vLLM's own words (`vllm/distributed/kv_events.py`), and how they leave the engine.

vLLM publishes what the connector gives it among its own events, if it publishes any; or kdn does,
on an endpoint of its own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from kdn.engines.vllm.event_publisher import EventPublisher, endpoint_of
from kdn.engines.vllm.events import Event, Events, ExtraKeys, Stored
from kdn.engines.vllm.settings import Settings
from kdn.session.changes import Medium

try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys
except ImportError:  # before 0.32 both had one form

    def to_event_extra_keys(extra_keys: Any) -> Any:
        return list(extra_keys) if extra_keys else None


GROUP = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
"""Of the only group of layers that there is: `check_blocks` refuses others."""


def are_wanted(config: Any, settings: Settings) -> bool:
    """Whether anybody is told."""
    told = getattr(config, "kv_events_config", None)
    by_vllm = told is not None and told.enable_kv_cache_events and told.publisher != "null"
    return bool(by_vllm or settings.events_endpoint)


class Messages:
    """Events of the scheduler's side, as vLLM's."""

    def __init__(self, config: Any, settings: Settings) -> None:
        self._block_tokens = int(config.cache_config.block_size)
        self.events = Events(self._block_tokens, self._extra_keys)
        place = "REMOTE" if settings.is_remote else "LOCAL"
        self._locality = {Medium.HOST: "LOCAL", Medium.PLACE: place}
        parallel = config.parallel_config
        self._rank = int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
        self._publisher: EventPublisher | None = None
        if settings.events_endpoint:
            import msgspec

            self._publisher = EventPublisher(
                endpoint_of(settings.events_endpoint, self._rank),
                settings.events_topic or default_topic(config),
                msgspec.msgpack.Encoder().encode,
            )

    def take(self) -> list[Any]:
        """For vLLM to publish; nothing, if kdn does it."""
        found = [self._message(event) for event in self.events.take()]
        if self._publisher is None or not found:
            return found
        batch = KVEventBatch(ts=time.time(), events=found, data_parallel_rank=self._rank)
        self._publisher.publish(batch)
        return []

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _message(self, event: Event) -> Any:
        about = {"medium": event.medium.value, "locality": self._locality[event.medium]}
        if not isinstance(event, Stored):
            return BlockRemoved(block_hashes=_names(event.hashes), group_idx=0, **about)
        blocks = event.blocks
        return BlockStored(
            block_hashes=_names(blocks.hashes),
            parent_block_hash=None if blocks.parent is None else _names([blocks.parent])[0],
            token_ids=blocks.tokens.tolist(),
            block_size=self._block_tokens,
            lora_id=blocks.lora_id,
            lora_name=blocks.lora_name,
            extra_keys=to_event_extra_keys(blocks.extra_keys),
            **GROUP,
            **about,
        )

    def _extra_keys(self, request: Any, first: int, last: int) -> Sequence[ExtraKeys | None]:
        size = self._block_tokens
        return [
            generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)[0]
            for at in range(first, last)
        ]


def _names(hashes: Sequence[bytes]) -> list[Any]:
    """As vLLM shows them: as bytes, or, if it is told so, as numbers."""
    return [maybe_convert_block_hash(one) for one in hashes]


def default_topic(config: Any) -> str:
    """`kv@POD@MODEL`, by which routers know the pod."""
    model = config.model_config
    served = getattr(model, "served_model_name", None) or model.model
    name = served if isinstance(served, str) else served[0]
    pod = os.environ.get("POD_NAME") or os.environ.get("HOSTNAME") or socket.gethostname()
    return f"kv@{pod}@{name}"
