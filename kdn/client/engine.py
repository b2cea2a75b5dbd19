"""A loaded model with all that goes with it, and a context that it is reading.

Forward passes run in threads: the event loop stays free for what is on the wire. Those that go on
from a context take turns; beside them the model may read along for a delivery
(`kdn/engines/compute.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kdn.background import outwait
from kdn.blend.pieces import Join
from kdn.cache.keys import Chunk, Namespace
from kdn.cache.spec import ModelSpec
from kdn.cache.states import State
from kdn.cache.tensors import KVCache
from kdn.checked import shown
from kdn.client.looking import Looking
from kdn.defaults import DEVICE
from kdn.engines.batching import answer_all
from kdn.engines.device import (
    Device,
    DType,
    check_placed,
    chosen_device,
    chosen_dtype,
    model_stream,
    wait_for_model,
)
from kdn.engines.generating import Sampling, generate
from kdn.engines.growing import Room, Rooms, growing_cache, is_written_by_rows
from kdn.engines.latents import as_cached
from kdn.engines.prompts import Prompts
from kdn.engines.reading import forward, last_tokens
from kdn.engines.states import kv_layers
from kdn.engines.transformers import from_dynamic_cache, to_dynamic_cache
from kdn.engines.unchanged import Unchanged
from kdn.errors import MismatchError, UnsupportedError
from kdn.session.delivered import Delivered

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

GPU_CHUNKS = 8
"""That a GPU reads at a time: with fewer it waits for its host."""

ModelSource = str | Path | tuple[Any, Any]
"""A name or folder for `load_model`, or a model of transformers and its tokenizer."""


@dataclass
class Context:
    """What a model has read: `past` holds the first tokens of `tokens`."""

    past: DynamicCache
    tokens: list[int] = field(default_factory=list)
    delivered: Delivered | None = None
    """What of it came from a delivery."""
    joined: Join | None = None
    """What it began with, if that was learned apart: nothing on top of it may be published."""
    looking: Looking | None = None
    """How much of it the next question makes the model compute anew."""
    is_mended: bool = False
    """Some of what was delivered has been computed anew."""
    room: Room | None = None
    """Where its values lie."""
    logits: torch.Tensor | None = None
    """After the last token that was read."""
    snapshot: tuple[int, State] | None = None
    """Of a model with recurrent layers: a number of tokens, and its state after them."""
    is_broken: bool = False
    """A pass failed halfway: some layers may hold tokens that others lack."""

    def check(self) -> None:
        """MismatchError if it is of no use any more."""
        if self.is_broken:
            raise MismatchError("reading failed halfway before: begin anew, with another context")

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Around a pass that adds to `past`."""
        self.check()
        self.is_broken = True
        yield
        self.is_broken = False

    @property
    def num_tokens(self) -> int:
        return int(self.past.get_seq_length())

    @property
    def exact_until(self) -> int | None:
        """See `Delivered`."""
        if self.joined is not None:
            return 0
        return None if self.delivered is None else self.delivered.exact_until


@dataclass(frozen=True)
class ContextSource:
    """Reads chunks among the last tokens of a context: a copy, as the context goes on."""

    context: Context

    def read(self, chunk: Chunk) -> KVCache:
        self.context.check()
        past = self.context.past
        with model_stream(kv_layers(past)[0].keys.device):
            return last_tokens(past, chunk.start, chunk.end).queued()


@dataclass(frozen=True)
class Engine:
    model: PreTrainedModel
    tokenizer: Any
    spec: ModelSpec
    namespace: Namespace
    prompts: Prompts
    rooms: Rooms
    unchanged: Unchanged
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    async def names(self) -> Namespace:
        """`namespace`, if the model is still the one that it names: MismatchError if not."""
        await asyncio.to_thread(self.unchanged.check)
        return self.namespace

    def check_length(self, num_tokens: int) -> None:
        """UnsupportedError for a text in which the model turns its keys otherwise."""
        most = self.spec.max_tokens
        if most is not None and num_tokens > most:
            raise UnsupportedError(
                f"expected a text of at most {most:,} tokens, found {num_tokens:,}: in longer ones "
                "this model turns every key by the length of the whole (dynamic NTK or longrope), "
                "so what is known of a part is of no use"
            )

    def new_context(self, room: Room | None = None) -> Context:
        """Empty, to be read into, in `room` if there is one."""
        return Context(growing_cache(self.config, room), room=room)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def by_rows(self) -> bool:
        """See `kdn/engines/growing.py`."""
        return is_written_by_rows(self.spec, self.device)

    @property
    def chunks_at_once(self) -> int:
        """To let the model read. A layer with a window drops what is not taken at once, and a
        recurrent one has its state where it has stopped only."""
        return GPU_CHUNKS if self.by_rows and not self.spec.has_states else 1

    def room_for(self, num_tokens: int) -> Room | None:
        """To deliver into, if the model works in memory that a decoder can write to."""
        return self.rooms.take(num_tokens) if self.by_rows or self.device.type == "cpu" else None

    def leave(self, context: Context) -> None:
        """Nobody will use this context again."""
        self.rooms.give(context.room)
        context.room = None

    def context_of(
        self,
        cache: KVCache,
        tokens: Sequence[int],
        room: Room | None = None,
        state: State | None = None,
    ) -> Context:
        """A context that goes on from a delivered cache, without a copy if it lies in `room`."""
        with model_stream(self.device):
            past = to_dynamic_cache(self.to_model(cache), self.config, room, state)
        return Context(past, list(tokens[: cache.end]), room=room)

    def lies_in_room(self, context: Context) -> bool:
        """Whether every layer reads the memory that was delivered into: none has a window, and none
        has grown out of it."""
        room = context.room
        return room is not None and all(
            window is None and layer.keys.data_ptr() == room.keys[index].data_ptr()
            for index, (layer, window) in enumerate(
                zip(kv_layers(context.past), self.spec.windows, strict=True)
            )
        )

    def values_of(self, context: Context) -> KVCache:
        """All it holds: the room that it lies in, or else a copy."""
        if self.lies_in_room(context):
            assert context.room is not None
            return context.room.canonical(context.num_tokens)
        with model_stream(self.device):
            return from_dynamic_cache(context.past)

    def to_model(self, cache: KVCache) -> KVCache:
        """In the model's dtype, on its device."""
        keys, values = (
            t.to(self.model.device, self.model.dtype) for t in (cache.keys, cache.values)
        )
        return KVCache(keys, values, cache.start, cache.valid_from)

    async def read(self, context: Context, tokens: Sequence[int]) -> None:
        """Let the model read on."""
        async with self.lock:
            await _finish(self._forward, context, tokens)

    def _forward(self, context: Context, tokens: Sequence[int]) -> None:
        """All in one thread: whoever is cancelled meanwhile leaves tokens and values in step."""
        finish_check = self.unchanged.begin()  # or it would go on from what another model has read
        held = context.num_tokens
        with context.going_on():
            logits = forward(self.model, tokens, context.past)
            finish_check()
            wait_for_model(self.device)
        context.logits = logits
        context.tokens[held:] = tokens

    async def run(self, function: Any, *arguments: Any) -> Any:
        """In a thread, when the model is free."""
        async with self.lock:
            return await _finish(function, *arguments)

    def append(self, context: Context, cache: KVCache, tokens: Sequence[int]) -> None:
        """Go on with values that were delivered."""
        # What was made in inference mode may be written only in it.
        with model_stream(self.device), torch.inference_mode():
            part = self.to_model(cache)
            for layer in range(part.num_layers):
                keys, values = (t[layer].transpose(0, 1)[None] for t in (part.keys, part.values))
                context.past.update(*as_cached(keys, values, self.config), layer)
        context.tokens += tokens

    async def answer(self, context: Context, sampling: Sampling) -> AsyncGenerator[int, None]:
        """Token by token. Afterwards the context's cache may lack the last one."""
        assert context.logits is not None, "a question comes first"
        tokens = generate(self.model, context.logits, context.past, sampling)

        def next_token() -> int | None:
            with context.going_on():
                return next(tokens, None)

        while True:
            async with self.lock:
                token = await _finish(next_token)
            if token is None:
                return
            context.tokens.append(token)
            yield token

    async def answer_all(
        self, context: Context, rows: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[int]]:
        """A batch of questions; the context is used up."""
        await self.names()
        async with self.lock:
            answers: list[list[int]] = await _finish(
                answer_all, self.model, context.past, rows, sampling
            )
        return answers

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


async def _finish(function: Any, *arguments: Any) -> Any:
    """In a thread. However often the caller is cancelled, the pass is waited for: the model and the
    memory it writes to must be free before anybody else uses them."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    await outwait(running)
    return running.result()


def values_of_cache(cache: Any, spec: ModelSpec) -> KVCache:
    """Of a model of transformers or in the canonical layout, if it is one of this model's."""
    from transformers import Cache

    if not isinstance(cache, KVCache | Cache):
        raise UnsupportedError(
            f"expected past_key_values or a KVCache, found {type(cache).__name__}"
        )
    values = cache if isinstance(cache, KVCache) else from_dynamic_cache(cache)
    found = (values.num_layers, values.num_kv_heads, values.head_dim)
    expected = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    if found != expected:
        raise MismatchError(f"expected (layers, heads, size) {expected}, found {found}")
    return values


def check_source(source: ModelSource) -> None:
    """Its kind only: whether there is such a model shows when it is loaded."""
    is_named = isinstance(source, str | Path) and bool(str(source).strip())
    if not is_named and not (isinstance(source, tuple) and len(source) == 2):
        raise UnsupportedError(
            "model: expected a name, a folder, or (model, tokenizer) of transformers, "
            f"found {shown(source)}"
        )


def load_pair(source: ModelSource, device: Device = DEVICE, dtype: DType = None) -> tuple[Any, Any]:
    """A model and its tokenizer, as `kdn/engines/device.py` says; those that are given stay as and
    where they are."""
    if isinstance(source, tuple):
        model, tokenizer = source
        check_placed(model, device, dtype)
        return model.eval(), tokenizer
    from kdn.engines.grouped import use_grouped_attention
    from kdn.engines.models import load_model

    place = chosen_device(device)
    model, tokenizer = load_model(source, chosen_dtype(dtype, place), place)
    use_grouped_attention(model)
    return model, tokenizer
