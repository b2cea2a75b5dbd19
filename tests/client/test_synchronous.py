"""The same client without an event loop."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import kdn
from kdn.errors import StoreError
from tests.client.clients import QUESTION, TEXT, own_answer, prompt_of
from tests.client.letters import Letters


def test_it_learns_asks_converses_loads_and_forgets(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = own_answer(model, prompt_of(TEXT, QUESTION), 9)
    with kdn.connect(tmp_path, model=(model, Letters()), codec="exact", recompute=False) as client:
        learned = client.learn("notes", TEXT)
        assert isinstance(learned, kdn.Learned)
        answer = client.ask("notes", QUESTION, max_new_tokens=9)
        assert "".join(answer) == answer.text == expected
        assert answer.stats.known_tokens == learned.computed_tokens
        assert client.ask("notes", QUESTION, max_new_tokens=9).read() == expected
        talk = client.converse("notes", max_new_tokens=9)
        assert talk.ask(QUESTION).read() == expected
        assert talk.tokens[: len(prompt_of(TEXT, QUESTION))] == prompt_of(TEXT, QUESTION)
        ids = client.tokenizer("x" * 300).input_ids
        assert client.load(ids).num_tokens == 0
        assert client.metrics.answers == 3
        cut_short = client.ask("notes", QUESTION)
        next(cut_short)
        cut_short.close()
        assert client.flush()
        assert client.forget("notes")
        with pytest.raises(StoreError, match="no name"):
            client.ask("notes", "?").read()
    assert not [thread for thread in threading.enumerate() if thread.name == "kdn"]


def test_a_door_that_does_not_open_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(kdn.KdnError):
        kdn.connect(tmp_path, model=str(tmp_path / "no-such-model"))
    assert not [thread for thread in threading.enumerate() if thread.name == "kdn"]


def test_importing_kdn_imports_no_heavy_library() -> None:
    code = "import sys, kdn; print({'torch', 'numpy', 'aiohttp'} & set(sys.modules), dir(kdn)[:1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("set()")
    assert all(hasattr(kdn, name) for name in kdn.__all__)
    with pytest.raises(AttributeError):
        kdn.nothing  # noqa: B018
