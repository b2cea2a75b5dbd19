"""Requests that name what was learned, `{"kdn": {"with": ["report", "faq"]}}`, made prompts.

The prompt is the head that all named texts were learned behind, the tokens of each exactly as they
were learned, and what the request itself asks, by the model's chat template:

    head | report | faq | question, and the rest of the conversation

vLLM takes it as token ids: of a completion as its `prompt`, of a chat beside its messages, in
`kv_transfer_params`. There the connector is told where the pieces are, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kdn.cache.keys import TokenIds, token_ids
from kdn.checked import checked_text, checked_tokens, shown
from kdn.engines.prompts import CHAT, PLAIN, Prompts
from kdn.engines.vllm.references import Learned, References, Refusal, check_length, checked_names
from kdn.engines.vllm.settings import PIECES_KEY, REQUEST_KEY
from kdn.errors import UnsupportedError

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IDS_KEY = "prompt_token_ids"
"""Under which vLLM takes the tokens of a chat, in `kv_transfer_params`."""
ROLES = ("system", "user", "assistant")
TEMPLATE_FIELDS = (
    "tools", "documents", "chat_template", "chat_template_kwargs", "continue_final_message",
    "reasoning_effort", "echo", "add_special_tokens", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
"""Of a chat: what changes its prompt, or makes vLLM pass over the tokens that it was given."""
PROMPT_FIELDS = ("prompt_embeds", "suffix", "echo")
"""Of a completion."""
BOTH_FIELDS = ("truncate_prompt_tokens",)
MAX_TOKEN_CHARS = 128
"""No tokenizer makes less tokens of a text."""
TOKENIZE_S = 30.0

Given = str | TokenIds | list[dict[str, str]]
"""What a request itself says: a text, tokens, or messages."""


@dataclass(frozen=True)
class Referring:
    """Of one server."""

    references: References
    prompts: Prompts
    max_tokens: int
    """Of a prompt and its answer."""
    vocab_size: int
    takes_chats: bool = True
    """Whether this vLLM takes the tokens of a chat."""
    joins: bool = True
    """Whether the connector wants to know where the pieces are."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kdn"))
    """One for all: tokenizers do not like to be used by two at once."""

    async def rewritten(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """What vLLM is to see instead of a request that has a member "kdn". Refusal if it cannot
        be served exactly as it is meant."""
        if path not in (CHATS, COMPLETIONS):
            raise Refusal(400, f'"kdn": names may be given to {CHATS} and {COMPLETIONS} only')
        if path == CHATS and not self.takes_chats:
            raise Refusal(501, f"this vLLM takes no token ids for a chat: ask {COMPLETIONS}")
        names = _names(request["kdn"])
        params = _transfer_params(request)
        _check_fields(request, path)
        given = _messages(request) if path == CHATS else _prompt(request, self.vocab_size)
        _check_size(given, self.max_tokens)
        found = await self.references.resolve(names, self.max_tokens)
        tokens, pieces = await self._prompt(given, found, is_chat=path == CHATS)
        if self.joins and pieces:
            params[REQUEST_KEY] = {**params.get(REQUEST_KEY, {}), PIECES_KEY: pieces}
        told = {name: value for name, value in request.items() if name != "kdn"}
        if path == CHATS:
            params[IDS_KEY] = tokens
        else:
            told["prompt"] = tokens
        return {**told, "kv_transfer_params": params} if params else told

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _prompt(
        self, given: Given, found: Sequence[Learned], *, is_chat: bool
    ) -> tuple[list[int], list[list[int]]]:
        """The prompt, and where the pieces are in it."""

        def put_together() -> tuple[list[int], list[list[int]]]:
            return self._joined(found, *self._tokens(given), is_chat=is_chat)

        try:
            async with asyncio.timeout(TOKENIZE_S):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, put_together)
        except TimeoutError:
            raise Refusal(503, "too much is being asked at the moment: try again") from None

    def _tokens(self, given: Given) -> tuple[TokenIds, TokenIds]:
        """Of what the request itself says: before what was learned, and after it."""
        none = token_ids([])
        if isinstance(given, np.ndarray):
            return none, given
        if isinstance(given, str):
            return none, token_ids(self.prompts.ask(given, PLAIN))
        try:
            begin, rest = self.prompts.conversation(given)
        except UnsupportedError as error:
            raise Refusal(400, str(error), "messages") from error
        has_own = any(one["role"] == "system" for one in given)
        return token_ids(begin if has_own else []), token_ids(rest)

    def _joined(
        self, found: Sequence[Learned], begin: TokenIds, rest: TokenIds, *, is_chat: bool
    ) -> tuple[list[int], list[list[int]]]:
        """What has no head that is told can only stand alone."""
        first = found[0]
        if is_chat and (other := next((one for one in found if one.style != CHAT), None)):
            raise Refusal(
                400, f"{other.name!r} was not learned for a chat: ask {COMPLETIONS}", "kdn.with"
            )
        heads = [self._head(one) for one in found] if len(found) > 1 else [first.head or 0]
        _check_heads(found, heads, begin)
        own = [one.tokens[head:] for one, head in zip(found, heads, strict=True)]
        ends = heads[0] + np.cumsum([len(one) for one in own])
        check_length(int(ends[-1]) + len(rest), self.max_tokens)
        tokens = np.concatenate([first.tokens[: heads[0]], *own, rest]).tolist()
        starts = [heads[0], *ends[:-1].tolist()]
        pieces = [list(one) for one in zip(starts, ends.tolist(), strict=True)]
        return tokens, pieces if len(found) > 1 or first.head is not None else []

    def _head(self, one: Learned) -> int:
        """How many of its tokens are the head."""
        if one.head is not None:
            return one.head
        begin = self.prompts.begin()
        if one.tokens[: len(begin)].tolist() == begin and len(begin) < len(one.tokens):
            return len(begin)  # a text that was learned before heads were noted
        raise Refusal(
            400, f"{one.name!r} cannot stand beside others: learn it again, as a text", "kdn.with"
        )


def _names(given: Any) -> list[str]:
    if not isinstance(given, dict):
        raise Refusal(400, f'"kdn": expected {{"with": [names]}}, found {shown(given)}')
    if unknown := [name for name in given if name != "with"]:
        raise Refusal(400, f'"kdn": there is no {shown(unknown[0])}; known is "with"')
    return checked_names(given.get("with"))


def _transfer_params(request: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, in which there is room for what is told the connector."""
    params = request.get("kv_transfer_params") or {}
    own = params.get(REQUEST_KEY) or {} if isinstance(params, dict) else None
    if not isinstance(own, dict):
        raise Refusal(400, "expected an object, as its kdn", "kv_transfer_params")
    if IDS_KEY in params or PIECES_KEY in own:
        raise Refusal(
            400, 'expected names in "kdn", or tokens and pieces here, not both',
            "kv_transfer_params",
        )  # fmt: skip
    return {**params, REQUEST_KEY: own} if own else dict(params)


def _check_fields(request: Mapping[str, Any], path: str) -> None:
    own = TEMPLATE_FIELDS if path == CHATS else PROMPT_FIELDS
    for name in (*own, *BOTH_FIELDS):
        value = request.get(name)
        if value is not None and value is not False and value != [] and value != {}:
            raise Refusal(
                400, f'{name} cannot be used together with names in "kdn": leave it out', name
            )
    if path == CHATS and request.get("add_generation_prompt") is False:
        raise Refusal(
            400, 'expected an answer to be asked for beside "kdn"', "add_generation_prompt"
        )


def _messages(request: Mapping[str, Any]) -> list[dict[str, str]]:
    """Those of a chat, all of them text."""
    given = request.get("messages")
    if not isinstance(given, list) or not given:
        raise Refusal(400, "expected a list of messages", "messages")
    return [_message(one) for one in given]


def _message(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise Refusal(
            400, f'beside "kdn", expected messages of the roles {", ".join(ROLES)}', "messages"
        )
    others = [name for name, value in given.items() if name not in ("role", "content") and value]
    content = given.get("content")
    if isinstance(content, list):  # as vLLM joins them
        parts = [_part(one) for one in content]
        content = "\n".join(parts)
    if others or not isinstance(content, str):
        raise Refusal(400, 'beside "kdn", expected messages of nothing but text', "messages")
    return {"role": given["role"], "content": _text("messages", content)}


def _part(given: Any) -> str:
    is_text = isinstance(given, dict) and set(given) == {"type", "text"} and given["type"] == "text"
    if not is_text or not isinstance(given["text"], str):
        raise Refusal(400, 'beside "kdn", expected messages of nothing but text', "messages")
    return str(given["text"])


def _prompt(request: Mapping[str, Any], vocab_size: int) -> str | TokenIds:
    """That of a completion: one text, or the token ids of one."""
    given = request.get("prompt")
    if isinstance(given, str):
        return _text("prompt", given)
    if not isinstance(given, list) or any(type(one) is not int for one in given):
        raise Refusal(400, 'beside "kdn", expected one prompt: a text or token ids', "prompt")
    try:
        return token_ids(checked_tokens("prompt", given, vocab_size))
    except UnsupportedError as error:
        raise Refusal(400, str(error), "prompt") from None


def _check_size(given: Given, max_tokens: int) -> None:
    """Before it is tokenised."""
    texts = [one["content"] for one in given] if isinstance(given, list) else [given]
    if sum(map(len, texts)) > MAX_TOKEN_CHARS * max_tokens:
        raise Refusal(400, f"expected less: the model takes {max_tokens} tokens", "messages")


def _text(name: str, given: str) -> str:
    try:
        return checked_text(name, given, empty=True)
    except UnsupportedError as error:
        raise Refusal(400, str(error), name) from None


def _check_heads(found: Sequence[Learned], heads: Sequence[int], begin: TokenIds) -> None:
    """All must have been learned behind the same, and if the request has one, behind that."""
    first = found[0].tokens[: heads[0]]
    for one, head in zip(found, heads, strict=True):
        if not np.array_equal(one.tokens[:head], first):
            raise Refusal(
                400,
                f"{one.name!r} was learned behind another head than {found[0].name!r}: learn both "
                "behind one",
                "kdn.with",
            )
    if len(begin) and not np.array_equal(begin, first):
        raise Refusal(
            400,
            f"{found[0].name!r} was learned behind another system prompt: leave this one out, or "
            "learn it behind this one",
            "messages",
        )
