"""What resolves the names in requests, opened from what vLLM's server knows of its own engine: the
connector's settings, the model, the chat template. Each process of the server opens its own, when
it gets the first request with names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from kdn.cache.keys import seal_key
from kdn.engines.prompts import Prompts
from kdn.engines.vllm.identity import spec_of_model
from kdn.engines.vllm.references import References, Refusal
from kdn.engines.vllm.referring import Referring
from kdn.engines.vllm.settings import Settings
from kdn.errors import UnsupportedError
from kdn.places.places import is_folder, open_places

logger = logging.getLogger("vllm.kdn")

CONNECTOR = "KdnConnector"
OPEN_S = 60.0
"""For the first request: the engine has named the model already, which may take long."""
AGAIN_S = 10.0
"""After it has failed, it is not tried for so long."""


class OpenedReferences:
    """Its methods belong to one event loop."""

    def __init__(self, state: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._parts = AsyncExitStack()
        self._opening: asyncio.Task[Referring] | None = None
        self._failed_s: float | None = None

    async def get(self) -> Referring:
        """Refusal if it cannot be opened, or not yet."""
        if self._failed_s is not None and self._clock() >= self._failed_s + AGAIN_S:
            self._opening = self._failed_s = None
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        try:
            async with asyncio.timeout(OPEN_S):
                return await asyncio.shield(self._opening)
        except Exception as error:
            opening = self._opening
            if not opening.done() or opening.exception() is None:  # it was not in time, no more
                raise Refusal(503, "names cannot be looked up yet: try again") from None
            if self._failed_s is None:
                self._failed_s = self._clock()
                logger.exception("kdn resolves no names for this server")
            raise Refusal(501, f"names are not resolved by this server: {_told(error)}") from error

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            [referring] = await asyncio.gather(self._opening, return_exceptions=True)
            if isinstance(referring, Referring):
                referring.close()
        await self._parts.aclose()

    async def _open(self) -> Referring:
        config = self._state.vllm_config
        settings = connector_settings(config.kv_transfer_config)
        own, model = settings.session, config.model_config
        if any(map(is_folder, own.where)):
            raise UnsupportedError("a folder is open in one process only, the engine: run a node")
        spec = await asyncio.to_thread(spec_of_model, model, config.load_config)
        tokenizer = await asyncio.to_thread(_tokenizer_of, model)
        prompts, takes_chats = Prompts(tokenizer, **template_of(self._state)), takes_ids()
        # Last: what fails is tried again, and must leave nothing open.
        opening = open_places(
            own.where, token=own.credentials.token, client=own.client, tls_ca=own.credentials.tls_ca
        )
        places = await self._parts.enter_async_context(opening)
        references = References(
            places.names, spec.fingerprint, seal_key(own.secret), spec.vocab_size
        )
        return Referring(
            references, prompts, int(model.max_model_len), spec.vocab_size,
            takes_chats=takes_chats, joins=settings.blend != "off",
        )  # fmt: skip


def connector_settings(transfer: Any) -> Settings:
    """Those of kdn's connector, which may be one of several."""
    extra = dict(getattr(transfer, "kv_connector_extra_config", None) or {})
    if getattr(transfer, "kv_connector", None) == CONNECTOR:
        return Settings.parse(extra)
    others = extra.get("connectors", ())
    for one in others if isinstance(others, list) else ():
        if isinstance(one, Mapping) and one.get("kv_connector") == CONNECTOR:
            return Settings.parse(one.get("kv_connector_extra_config") or {})
    raise UnsupportedError(f"it has no {CONNECTOR}")


def template_of(state: Any) -> dict[str, Any]:
    """What this server tells its chat template, beside messages."""
    chats = getattr(state, "openai_serving_chat", None)
    template = getattr(chats, "chat_template", None)
    told = dict(getattr(chats, "default_chat_template_kwargs", None) or {})
    return {**told, **({"chat_template": template} if template else {})}


def takes_ids() -> bool:
    """Whether vLLM takes the tokens of a chat in `kv_transfer_params`: else it would answer without
    what was named, and nobody would know."""
    try:
        from vllm.renderers import online_renderer
    except ImportError:
        return False
    return hasattr(online_renderer, "_reused_prompt_token_ids")


def _tokenizer_of(model_config: Any) -> Any:
    """One of its own: vLLM's is used by vLLM's threads."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=getattr(model_config, "tokenizer_revision", None),
        trust_remote_code=bool(getattr(model_config, "trust_remote_code", False)),
    )


def _told(error: Exception) -> str:
    """To clients: nothing of paths and addresses."""
    return str(error) if isinstance(error, UnsupportedError) else "its log says why"
