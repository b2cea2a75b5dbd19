"""vLLM's own server: texts by name, and texts that are found by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdn
from tests.vllm.harness import Node, connector, tiny_model
from tests.vllm.served import Served, bytes_tokenizer, serving

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REPORT = "The harbour was built of granite, and the tide takes six hours. " * 3
FAQ = "Ships that are late pay nothing; those that are early wait outside. " * 3
QUESTION = "How long does the tide take?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder)
    bytes_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def learned(model: Path, node: Node) -> None:
    with kdn.connect(node.url, model=str(model), codec="exact", device="cpu") as client:
        client.learn("report", REPORT)
        client.learn("faq", FAQ)


@pytest.fixture(scope="module")
def served(model: Path, node: Node, logs: Path, learned: None) -> Iterator[Served]:
    transfer = connector(node.url, codec="exact", quality="exact", blend="auto", seams=None)
    with serving(model, logs / "served.log", transfer) as server:
        yield server


def prompt_of(model: Path, *texts: str) -> list[int]:
    """As they were learned, one behind the other, and the question."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    parts = ["<s>[user]", *(f"{text}\n\n" for text in texts), f"{QUESTION}</s>[assistant]"]
    return [one for part in parts for one in tokenizer(part, add_special_tokens=False).input_ids]


def asked(*names: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, "kdn": {"with": list(names)}, **more}


def test_by_reference_is_what_the_text_in_full_is(served: Served, model: Path) -> None:
    prompt = prompt_of(model, REPORT)
    full = served.ask(COMPLETIONS, prompt=prompt, cache_salt="alone")  # nothing is known with it
    loads = served.count("loaded_tokens")
    told = served.ask(CHATS, **asked("report"), return_token_ids=True)
    assert told["prompt_token_ids"] == prompt
    assert told["choices"][0]["message"]["content"] == full["choices"][0]["text"]
    assert served.count("loaded_tokens") > loads
    again = served.ask(COMPLETIONS, prompt=f"{QUESTION}</s>[assistant]", kdn={"with": ["report"]})
    assert again["choices"][0]["text"] == full["choices"][0]["text"]


def test_two_names_are_joined_and_so_is_their_text_by_itself(served: Served, model: Path) -> None:
    prompt = prompt_of(model, FAQ, REPORT)
    plain = served.ask(COMPLETIONS, prompt=prompt, cache_salt="alone")
    joins = served.count("joins")
    named = served.ask(CHATS, **asked("faq", "report"), return_token_ids=True)
    assert named["prompt_token_ids"] == prompt
    assert served.count("joins") == joins + 1
    found = served.ask(COMPLETIONS, prompt=prompt)
    assert found["choices"][0]["text"] == named["choices"][0]["message"]["content"]
    changed = [*prompt[:40], prompt[41], *prompt[41:]]
    alone = served.ask(COMPLETIONS, prompt=changed, cache_salt="alone")
    assert served.ask(COMPLETIONS, prompt=changed)["choices"] != found["choices"]
    assert (
        served.ask(COMPLETIONS, prompt=changed)["choices"][0]["text"]
        == (alone["choices"][0]["text"])
    )
    again = served.ask(COMPLETIONS, prompt=prompt, cache_salt="alone")
    assert again["choices"][0]["text"] == plain["choices"][0]["text"]


def test_a_stream_comes_in_parts(served: Served) -> None:
    status, said = served.post(CHATS, **asked("faq", "report"), stream=True, max_tokens=4)
    assert status == 200
    events = [one for one in said.decode().split("\n\n") if one.startswith("data: {")]
    assert len(events) >= 4
    assert all(json.loads(one[6:])["object"] == "chat.completion.chunk" for one in events)


def test_what_is_not_there_is_an_error_in_openais_form(served: Served) -> None:
    for body, status in (
        (asked("unknown"), 404), (asked("../faq"), 400), (asked("faq", tools=[{"x": 1}]), 400),
        ({**asked("faq"), "kdn": {"with": "faq"}}, 400), (asked(*["faq"] * 20), 400),
    ):  # fmt: skip
        code, said = served.post(CHATS, **body)
        assert (code, json.loads(said)["error"]["code"]) == (status, status)
    code, said = served.post("/v1/responses", input="x", kdn={"with": ["faq"]})
    assert code == 400
    assert (
        served.post(CHATS, messages=[{"role": "user", "content": "Hello."}], max_tokens=2)[0] == 200
    )
