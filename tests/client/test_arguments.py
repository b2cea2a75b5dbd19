"""Every argument of the public API, given absurdly: a named error, before anything is done."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import kdn
from kdn.cache.tensors import KVCache
from kdn.client.asynchronous import AsyncClient
from kdn.errors import KdnError, UnsupportedError
from tests.client.clients import TEXT, in_folder
from tests.client.letters import Letters

NAN, INF, HUGE = float("nan"), float("inf"), 10**30
NUMBERS: tuple[Any, ...] = (-1, NAN, INF, -INF, HUGE, "soon", True, [], b"x")
DEADLINES = (*NUMBERS, 0, 0.0)
QUALITIES = (-1, NAN, INF, HUGE, "perfect", "", True, [], b"x")
LISTS: tuple[Any, ...] = ([], ["a", ""], ["notes", 5], ["notes", ["notes"]], [b"x"], {}, {"notes"})
"""No pieces to join."""
NAMES = ("", " ", "a b", "a/b", "x" * 129, "\udcff", "a\0", 5, None, b"x", [5])
TEXTS = ("", " ", "\udcff", 5, None, b"x", ["a"], {})
COUNTS = (*NUMBERS, 0, 1.5, None)
SHARES = (*NUMBERS, 1.1)
FUNCTIONS = (5, "x", [])

SETTINGS: dict[str, tuple[Any, ...]] = {
    "where": ("", " ", [], None, 5, [5], [""], "a\0b", "http://", "ftp://h", "http://u:p@h",
              "http://h:99999", "http://h:port", "https://\x01", {"a": 1}),
    "model": ("", None, 5, (), ("a",), ("a", "b", "c"), [], b"x"),
    "device": ("", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99", "meta", None, 5, [], b"x"),
    "dtype": ("", "fp16", "int8", torch.int8, torch.float64, 5, [], b"x"),
    "codec": ("", "zip", None, 5, []),
    "quality": (*QUALITIES, None),
    "stored_quality": (*QUALITIES, None),
    "deadline_s": DEADLINES,
    "token": ("", "a b", "a\nb", "\udcff", "x" * 1025, 5, b"x"),
    "token_file": ("", "no/such/file", ".", "a\0b", 5, []),
    "secret": (b"", b"x" * 65, "text", 5, []),
    "secret_file": ("", "no/such/file", ".", 5),
    "tls_ca": ("no/such/file", ".", 5, []),
    "client": ("", "a b", "x" * 65, 5, b"x"),
    "spool_bytes": (*NUMBERS, 1.5, None),
    "state_spacing": (*NUMBERS, 0, 1.5, None),
    "request_log_bytes": (*NUMBERS, 1.5),
    "tracing": (1, "yes", []),
    "seams": (" ", "a b", "a/b", "x" * 65, 5, b"x", []),
    "audit_share": (-0.1, 1.1, NAN, INF, "x", None, True),
}  # fmt: skip
FREE = {"recompute", "rng", "clock"}
"""True or false, and what only tests give."""

FLAGS = {"force_latest", "stale_ok"}

METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
    "learn": {
        "name": NAMES,
        "what": ("", " ", "\udcff", 5, None, b"x", {}, [1.5], [-1], [128], [HUGE], [[1], [1, 2]],
                 [{"role": "user"}], [{"role": "user", "content": 5}], [{"content": "x"}, 5]),
        "head": tuple(text for text in TEXTS if text is not None),
        "stored_quality": QUALITIES, "on_read": FUNCTIONS,
    },
    "load": {
        "tokens": ("x", 5, None, b"x", {}, [1.5], [-1], [128], [HUGE], [[1], [1, 2]]),
        "quality": QUALITIES, "deadline_s": DEADLINES, "on_progress": FUNCTIONS,
    },
    "join": {
        "names": (*NAMES, *LISTS), "quality": QUALITIES, "deadline_s": DEADLINES,
        "on_progress": FUNCTIONS,
    },
    "ask": {
        "name": (*NAMES, *LISTS), "question": TEXTS, "quality": QUALITIES, "deadline_s": DEADLINES,
        "max_new_tokens": COUNTS, "temperature": (*NUMBERS, None),
        "seed": (*NUMBERS, 1.5, None), "on_progress": FUNCTIONS, "recompute_share": SHARES,
    },
    "ask_all": {
        "name": (*NAMES, *LISTS), "questions": (*TEXTS, [], [""], [5], "what?"),
        "quality": QUALITIES, "deadline_s": DEADLINES, "max_new_tokens": COUNTS,
        "recompute_share": SHARES,
    },
    "converse": {
        "name": tuple(name for name in (*NAMES, *LISTS) if name is not None), "quality": QUALITIES,
        "deadline_s": DEADLINES, "max_new_tokens": COUNTS, "temperature": (*NUMBERS, None),
        "seed": (*NUMBERS, 1.5, None), "recompute_share": SHARES,
    },
    "publish": {
        "tokens": ("x", 5, None, [1.5], [-1], [128]),
        "cache": (None, 5, [], "x", KVCache(torch.zeros(1, 4, 2, 3), torch.zeros(1, 4, 2, 3))),
        "after": (5, "x", []),
    },
    "flush": {"deadline_s": (*NUMBERS, None)},
    "forget": {"name": NAMES},
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "learn": {"name": "notes", "what": TEXT},
    "load": {"tokens": [1, 2, 3]},
    "join": {"names": ["notes"]},
    "ask": {"name": "notes", "question": "what?"},
    "ask_all": {"name": "notes", "questions": ["what?"]},
    "converse": {},
    "publish": {"tokens": [1] * 16, "cache": None},
    "flush": {},
    "forget": {"name": "notes"},
}


def test_no_argument_is_left_out() -> None:
    """A new one is tried as well, or this fails."""
    given = set(inspect.signature(AsyncClient).parameters)
    assert given == set(SETTINGS) | FREE
    for name, tried in METHODS.items():
        parameters = set(inspect.signature(getattr(AsyncClient, name)).parameters) - {"self"}
        assert parameters - FLAGS == set(tried), name


@pytest.mark.parametrize("name", SETTINGS)
def test_connecting_refuses_every_absurd_setting(
    name: str, tiny_model: Any, tmp_path: Path
) -> None:
    good = {"where": tmp_path / "own", "model": (tiny_model("llama"), Letters()), "codec": "exact"}
    for value in SETTINGS[name]:
        with pytest.raises(KdnError):
            kdn.connect(**{**good, name: value}).close()
    assert name == "tls_ca" or not (tmp_path / "own").exists(), "refused before anything is opened"


def test_every_method_refuses_every_absurd_argument(tiny_model: Any, tmp_path: Path) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def test(client: AsyncClient) -> None:
        for method, arguments in METHODS.items():
            for name, values in arguments.items():
                for value in values:
                    given = {**GOOD[method], name: value}
                    try:
                        found = getattr(client, method)(**given)
                        if inspect.isawaitable(found):
                            await found
                    except KdnError:
                        continue
                    except Exception as error:
                        raise AssertionError(f"{method}({name}={value!r}): {error!r}") from error
                    raise AssertionError(f"{method}({name}={value!r}) was taken")


@pytest.mark.parametrize("question", TEXTS)
def test_a_conversation_refuses_what_is_no_question(
    question: Any, tiny_model: Any, tmp_path: Path
) -> None:
    @in_folder(tmp_path, tiny_model("llama"))
    async def test(client: AsyncClient) -> None:
        with pytest.raises(UnsupportedError, match="question"):
            client.converse().ask(question)


@pytest.mark.parametrize("quality", ["perfect", -1.0])
def test_a_quality_that_cannot_be_is_named_in_the_error(quality: Any) -> None:
    with pytest.raises(UnsupportedError, match="quality"):
        AsyncClient("x", quality=quality)


def test_a_model_without_profile_is_told_how_to_get_one(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))

    async def never(client: AsyncClient) -> None:
        raise AssertionError("it was opened")

    with pytest.raises(UnsupportedError, match="kdn calibrate"):
        in_folder(tmp_path / "folder", tiny_model("llama"), codec="klt")(never)


def test_a_token_does_not_show_in_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        kdn.connect(tmp_path, token="hush hush")
    assert "hush" not in str(caught.value)
    with pytest.raises(UnsupportedError) as caught:
        kdn.connect("http://user:hush@host")
    assert "hush" not in str(caught.value)
