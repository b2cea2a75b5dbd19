"""vLLM: a KV connector that loads what is known of a prompt and publishes what had to be computed.

    --kv-transfer-config '{"kv_connector": "KdnConnector", "kv_connector_module_path":
        "kdn.engines.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": "http://127.0.0.1:8470"}}'

`docs/vllm.md` tells what it does. One idea per file; vLLM itself is seen by `connector.py`,
`stats.py`, `checks.py`, `event_messages.py` and `opened_references.py` only:

- `connector.py`: vLLM's interface, handed on to the two sides; `stats.py`: counters for vLLM's log
  and metrics; `checks.py`: what is refused when vLLM starts.
- `scheduler.py`: what to load, with `request_state.py`; `saving.py`: what to publish;
  `lossy_blocks.py`: what never is.
- `worker.py`: doing it, with `loader.py` and `paged_sink.py`; `early.py`: what is on its way
  before vLLM has made room; `layout.py`: keys and values in
  vLLM's paged memory, `targets.py`: which layers are the model's; `weights.py`: whether the model's
  weights are still those it started with.
- On a GPU: `saver.py` copies out what is to be published, by `gather.py` or `gather_triton.py`,
  into the memory of `staging.py`; `warming.py` compiles ahead.
- `ranks.py`: several ranks, which meet in a folder (`rank_folder.py`): `one_fetch.py` loads for all
  of a host, with `rank_streams.py`; `gathering.py` publishes for all, with `rank_parts.py` and
  `rank_copies.py`.
- Joins: `piece_ranges.py` says where a prompt's pieces are, `join_lookup.py` what is known of them;
  `joins.py` keeps their blocks from others, `joined_load.py` writes them, `seam_source.py` has the
  seams that repair them.
- `events.py`: what routers are told, as `telling.py` finds it out; `event_messages.py`: in vLLM's
  words; `event_publisher.py`: by kdn itself.
- Prompts by reference: `middleware.py` stands around vLLM's server; `referring.py` makes prompts of
  requests, `references.py` resolves names, `opened_references.py` opens both from vLLM's settings.
- `messages.py`: what the sides tell each other; `shared.py`: the session that they share.
- `pace.py`: how fast the engine computes, for what loads have saved.
- `identity.py`: which model, and whose keys; `settings.py`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KdnConnector"]


def __getattr__(name: str) -> Any:
    """Lazily, so that the parts can be used and tested where vLLM is not installed."""
    if name == "KdnConnector":
        from kdn.engines.vllm.connector import KdnConnector

        return KdnConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
