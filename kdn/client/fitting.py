"""Seams for pieces of a kind: fitted by the client's own model, stored, and used from then on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kdn.background import outwait
from kdn.blend.pieces import Piece
from kdn.blend.seams import Seams
from kdn.checked import checked_function, checked_name, checked_text, checked_texts
from kdn.client.naming import piece_of
from kdn.engines.device import model_stream
from kdn.engines.seam_fitting import DEFAULTS, Example, OnProgress, SeamOptions, fit_seams
from kdn.errors import MismatchError
from kdn.session.seams import checked_tag, share_seams

if TYPE_CHECKING:
    from kdn.client.engine import Engine
    from kdn.session.session import Session


Asked = tuple[str, Sequence[str]]
"""A question, and the texts that it is asked about."""


class _StoppedError(Exception):
    """Nobody waits for these seams any more."""


async def fit_and_share(
    engine: Engine,
    session: Session,
    names: Sequence[str],
    texts: Sequence[str],
    examples: Sequence[Asked],
    tag: str,
    on_progress: OnProgress | None,
    options: SeamOptions = DEFAULTS,
) -> Seams:
    """The model is taken until they are fitted: some minutes for a small model on a CPU."""
    for name in names:
        checked_name(name)
    if texts:
        checked_texts("texts", texts)
    for question, about in examples:
        checked_text("question", question)
        checked_texts("examples", about)
    checked_tag(tag)
    checked_function("on_progress", on_progress)
    namespace = await engine.names()
    pieces = [await piece_of(session, engine.prompts, name, namespace) for name in names]
    head = _head_of(pieces, engine.prompts.begin())
    own = [piece.tokens[piece.head :].tolist() for piece in pieces]
    own += [_own_tokens(engine, text) for text in texts]
    asked = [
        Example(question, [_own_tokens(engine, text) for text in about])
        for question, about in examples
    ]
    stopped = threading.Event()

    def told(what: str, done: float, left_s: float) -> None:
        if stopped.is_set():
            raise _StoppedError
        if on_progress is not None:
            on_progress(what, done, left_s)

    def fit() -> Seams:
        with model_stream(engine.device):
            return fit_seams(
                engine.model, engine.prompts, engine.spec, own, head=head, examples=asked,
                options=options, on_progress=told,
            )  # fmt: skip

    async with engine.lock:
        fitting = asyncio.ensure_future(asyncio.to_thread(fit))
        try:
            seams = await asyncio.shield(fitting)
        except asyncio.CancelledError:
            stopped.set()
            await outwait(fitting)  # until then the model is not free
            raise
    await engine.names()  # or they would be those of another model
    await share_seams(session, seams, tag)
    return seams


def _own_tokens(engine: Engine, text: str) -> list[int]:
    """Behind any head, as it would be learned."""
    return engine.prompts.learn(text)[0][len(engine.prompts.begin()) :]


def _head_of(pieces: Sequence[Piece], usual: list[int]) -> list[int]:
    """The one that all were learned behind."""
    if not pieces:
        return usual
    first = pieces[0]
    head = first.tokens[: first.head]
    for piece in pieces[1:]:
        if not np.array_equal(piece.tokens[: piece.head], head):
            raise MismatchError(
                f"{piece} was learned behind another head than {first}: seams are of one"
            )
    return [int(token) for token in head]
