"""How many modules of kdn a request passes through: `python -m tests.journeys`.

A tiny random model learns a text and is asked about it, with the lossless codec, and the worker of
a vLLM engine looks a prompt up and loads it: first in a folder, then at a node over HTTP. Each is
counted with a client or an engine that is open already, and with one opened and closed for it.

A module counts if a function of its own was called during the journey, in any thread of this
process. So these do not count: what runs at import time (every journey is made once before it is
counted), methods that dataclasses generate, constants that are merely read, compiled kernels, and
the node, which is a process of its own. vLLM need not be installed, so its connector is left out.
What goes on in the background may or may not fall into a journey: a count may differ by one or two.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvloop

import kdn
from kdn.bench.node_servers import start_kdn
from kdn.client.asynchronous import AsyncClient
from tests.client.letters import Letters
from tests.conftest import TINY
from tests.engines import vllm_working as vllm

ROOT = str(Path(kdn.__file__).parent)
TEXT = "".join(chr(97 + i * i % 23 + i % 3) for i in range(700))

active: list[set[str]] = []
"""Of each journey under way, the files whose functions were called."""
modules: dict[str, list[str]] = {}
"""Of each journey that was made, what it passed through."""


def record(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    # Bodies of modules and classes are code too; functions alone are optimized.
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
        for called in active:
            called.add(code.co_filename)


@contextmanager
def journey(name: str) -> Iterator[None]:
    called: set[str] = set()
    active.append(called)
    yield
    active.remove(called)
    paths = sorted(Path(one).relative_to(ROOT) for one in called if one.startswith(ROOT))
    modules[name] = [".".join(path.with_suffix("").parts) for path in paths]


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).eval()


def client_at(where: str) -> AsyncClient:
    """It loads all it can: left the choice, so small a model would read everything itself."""
    model = tiny_model(), Letters()
    return AsyncClient(where, model=model, codec="exact", recompute=False)


async def learn(name: str, where: str) -> None:
    with journey(f"learn at {name}, opened for it"):
        async with client_at(where) as client:
            with journey(f"learn at {name}"):
                assert (await client.learn("notes", TEXT)).new_chunks == 4


async def ask(name: str, where: str) -> None:
    with journey(f"ask at {name}, opened for it"):
        async with client_at(where) as client:
            with journey(f"ask at {name}"):
                answer = client.ask("notes", "what comes next?", max_new_tokens=8)
                await answer.read()
            assert answer.stats.known_tokens == 709


def load(name: str, where: str) -> None:
    with vllm.shared_session(where) as shared:
        vllm.publish(shared)
    with (
        journey(f"load from {name} into vLLM, opened for it"),
        vllm.shared_session(where) as shared,
    ):
        worker, _ = vllm.make_worker(shared)
        with journey(f"load from {name} into vLLM"):
            know = partial(shared.session.know, vllm.TOKENS, block_tokens=vllm.BLOCK, whole=True)
            known = shared.submit(know).result(30)
            heads = known.heads(known.chunks)
            assert vllm.load(worker, 0, 576, heads=heads) == (set(), 576)


def travel() -> None:
    with tempfile.TemporaryDirectory() as base, start_kdn(Path(base) / "node") as node:
        places = {"a folder": f"{base}/folder", "a node": "http://{}:{}".format(*node.address)}
        for name, where in places.items():
            uvloop.run(learn(name, where))
            uvloop.run(ask(name, where))
            load(name, where)


def main() -> None:
    threading.setprofile(record)
    sys.setprofile(record)
    travel()
    travel()
    for name, found in modules.items():
        sys.stdout.write(f"{name}: {len(found)} modules\n  {' '.join(found)}\n")


if __name__ == "__main__":
    main()
