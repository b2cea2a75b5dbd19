"""Names in requests to vLLM's server: what they stand for, read from their sealed manifests.

What is read is kept for a few seconds, within bounds. Only what this server's own tenant and secret
have learned with this model is ever found. What goes wrong is a `Refusal`: the client is told what
to do, and the log what happened. Addresses and secrets are told to nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdn.cache.keys import TokenIds, token_ids
from kdn.checked import checked_tokens, is_name, shown
from kdn.errors import AuthenticityError, KdnError
from kdn.places.manifests import Entry, entry_of
from kdn.places.names import Names

logger = logging.getLogger(__name__)

MAX_NAMES = 64
"""Of one request."""
AT_ONCE = 8
RESOLVE_S = 5.0
"""For all names of a request."""
HELD_S = 5.0
"""A name that was learned again is seen after so long at most."""
MAX_HELD_TOKENS = 1 << 22
"""Of all names together: 16 MiB."""
MAX_HELD = 1 << 12
"""Names, which may be of few tokens."""


class Refusal(Exception):
    """A request that is not served, as its client is told."""

    def __init__(self, status: int, message: str, param: str = "kdn") -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


@dataclass(frozen=True)
class Learned:
    """What a name stands for."""

    name: str
    tokens: TokenIds
    head: int | None
    """Of its tokens; None: it was learned before heads were noted, or not as a text."""
    style: str

    @property
    def num_own(self) -> int:
        """Tokens behind its head."""
        return len(self.tokens) - (self.head or 0)


class References:
    """Of one model and one tenant."""

    def __init__(
        self,
        names: Names,
        model: bytes,
        seal_key: bytes,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names, self._model, self._seal_key = names, model, seal_key
        self._vocab_size, self._clock = vocab_size, clock
        self._held: OrderedDict[str, tuple[float, Learned]] = OrderedDict()
        """By name: until when it counts. The first is the oldest."""
        self._held_tokens = 0

    async def resolve(self, names: Sequence[str], max_tokens: int) -> list[Learned]:
        """In order; a name may come twice. Refusal if one is unknown, or all are too long."""
        found: dict[str, Learned] = {}
        distinct = list(dict.fromkeys(names))
        try:
            async with asyncio.timeout(RESOLVE_S):
                for start in range(0, len(distinct), AT_ONCE):
                    some = distinct[start : start + AT_ONCE]
                    for one in await asyncio.gather(*map(self._find, some)):
                        found[one.name] = one
                    check_length(sum(one.num_own for one in found.values()), max_tokens)
        except TimeoutError:
            raise _away(f"{len(names)} names took longer than {RESOLVE_S:g} s") from None
        return [found[name] for name in names]

    async def _find(self, name: str) -> Learned:
        until_s, held = self._held.get(name, (0.0, None))
        if held is not None and self._clock() < until_s:
            return held
        try:
            named = await self._names.get(name)
        except (KdnError, OSError) as error:
            raise _away(error) from error
        if named is None:
            raise Refusal(404, f"nothing was learned under the name {name!r} here", "kdn.with")
        try:
            entry = entry_of(named.manifest, name, self._model, self._seal_key)
        except AuthenticityError:
            logger.warning("no holder of this server's secret has written the name %r", name)
            # as if there were none: what others have is no affair of this client's
            raise Refusal(
                404, f"nothing was learned under the name {name!r} here", "kdn.with"
            ) from None
        except KdnError as error:
            raise _broken(name, error) from error
        if entry is None:
            raise Refusal(
                404, f"{name!r} was learned with another model: learn it with this one", "kdn.with"
            )
        learned = _learned(name, entry, self._vocab_size)
        self._hold(learned)
        return learned

    def _hold(self, learned: Learned) -> None:
        size = len(learned.tokens)
        _, before = self._held.pop(learned.name, (0.0, None))
        self._held_tokens += size - (0 if before is None else len(before.tokens))
        self._held[learned.name] = (self._clock() + HELD_S, learned)
        while self._held_tokens > MAX_HELD_TOKENS or len(self._held) > MAX_HELD:
            _, (_, oldest) = self._held.popitem(last=False)
            self._held_tokens -= len(oldest.tokens)


def checked_names(given: Any) -> list[str]:
    """Those of `"with"`."""
    if not isinstance(given, list) or not given:
        raise Refusal(400, '"with": expected a list of names', "kdn.with")
    if len(given) > MAX_NAMES:
        raise Refusal(
            400, f'"with": expected at most {MAX_NAMES} names, found {len(given)}', "kdn.with"
        )
    for name in given:
        if not isinstance(name, str) or not is_name(name):
            raise Refusal(
                400,
                "\"with\": expected names of 1 to 128 letters, digits, '.', '_', '-', "
                f"found {shown(name)}",
                "kdn.with",
            )
    return given


def check_length(num_tokens: int, max_tokens: int) -> None:
    """Of a prompt, before it is put together."""
    if num_tokens >= max_tokens:
        raise Refusal(
            400,
            f"this prompt has at least {num_tokens} tokens, and the model takes {max_tokens} with "
            "its answer: name less",
            "kdn.with",
        )


def _learned(name: str, entry: Entry, vocab_size: int) -> Learned:
    """Whatever a manifest holds."""
    try:
        tokens, head = entry["tokens"], entry.get("head")
        checked_tokens("tokens", tokens, vocab_size)
        ids = token_ids(np.asarray(tokens))
        is_head = head is None or (type(head) is int and 0 <= head < len(ids))
        if not len(ids) or not is_head:
            raise ValueError(f"{len(ids)} tokens behind a head of {shown(head)}")
    except (KdnError, LookupError, TypeError, ValueError) as error:
        raise _broken(name, error) from error
    return Learned(name, ids, head, str(entry.get("style", "")))


def _broken(name: str, why: object) -> Refusal:
    logger.error("the manifest of %r cannot be used: %s", name, why)
    return Refusal(502, f"{name!r} cannot be read: learn it again", "kdn.with")


def _away(why: object) -> Refusal:
    logger.warning("names in a request are not resolved: %s", why)
    return Refusal(503, "names cannot be looked up at the moment: try again", "kdn.with")
