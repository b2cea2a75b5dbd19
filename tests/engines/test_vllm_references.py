"""Prompts by reference: vLLM gets the named texts token by token, and a client that asks for what
is not there is told so, and no more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdn.cache.keys import seal_key
from kdn.engines.prompts import CHAT, PLAIN
from kdn.engines.vllm import opened_references as opened_file
from kdn.engines.vllm import references as references_file
from kdn.engines.vllm.opened_references import OpenedReferences, connector_settings, template_of
from kdn.engines.vllm.references import References, Refusal
from kdn.engines.vllm.referring import CHATS, COMPLETIONS
from kdn.errors import UnavailableError, UnsupportedError
from kdn.places.manifests import with_entry
from kdn.places.places import open_places
from tests.engines.vllm_referring import HEAD, KEY, MODEL, Server, chat, completion, entry, ids
from tests.node.harness import Running, run, tenant, with_node


def test_a_chat_gets_the_texts_token_by_token() -> None:
    told = Server().rewritten(CHATS, chat("faq", "report", temperature=0.5, stream=True))
    params = told.pop("kv_transfer_params")
    expected = [*HEAD, *ids("Some answers.\n\nThe report.\n\nWhy?<end>[assistant]")]
    begin, end = len(HEAD), len(HEAD) + 15
    assert params == {
        "prompt_token_ids": expected,
        "kdn": {"pieces": [[begin, end], [end, end + 13]]},
    }
    rest = {"model": "m", "temperature": 0.5, "stream": True}
    assert told == {**rest, "messages": [{"role": "user", "content": "Why?"}]}


def test_a_conversation_goes_on_behind_them() -> None:
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": [{"type": "text", "text": a} for a in ("And", "now?")]},
    ]
    told = Server().rewritten(CHATS, chat("report") | {"messages": messages})
    shown = "The report.\n\nWhy?<end>[assistant]So.<end>[user]And\nnow?<end>[assistant]"
    assert told["kv_transfer_params"]["prompt_token_ids"] == [*HEAD, *ids(shown)]
    assert told["messages"] == messages


def test_a_completion_gets_them_as_its_prompt() -> None:
    server = Server()
    told = server.rewritten(COMPLETIONS, completion("report", "report"))
    expected = [*HEAD, *ids("The report.\n\nThe report.\n\nWhy?")]
    begin = len(HEAD)
    pieces = [[begin, begin + 13], [begin + 13, begin + 26]]
    assert told == {
        "model": "m", "prompt": expected, "kv_transfer_params": {"kdn": {"pieces": pieces}},
    }  # fmt: skip
    told = server.rewritten(COMPLETIONS, completion("report") | {"prompt": [5, 6]})
    assert told["prompt"] == [*HEAD, *ids("The report.\n\n"), 5, 6]


def test_what_a_request_tells_the_connector_stays() -> None:
    own = {"kdn": {"quality": 0.01}, "do_remote_decode": False}
    told = Server().rewritten(COMPLETIONS, completion("report", kv_transfer_params=own))
    begin = len(HEAD)
    assert told["kv_transfer_params"] == {
        "kdn": {"quality": 0.01, "pieces": [[begin, begin + 13]]}, "do_remote_decode": False,
    }  # fmt: skip
    told = Server().rewritten(COMPLETIONS, completion("report", cache_salt="mine"))
    assert told["cache_salt"] == "mine"


def test_where_nothing_is_joined_the_texts_are_put_in_all_the_same() -> None:
    told = Server(joins=False).rewritten(COMPLETIONS, completion("report", "faq"))
    assert "kv_transfer_params" not in told
    assert told["prompt"] == [*HEAD, *ids("The report.\n\nSome answers.\n\nWhy?")]


def test_a_name_from_before_heads_were_noted() -> None:
    server = Server()
    server.names.learn("old", entry("Old.\n\n", head=None))
    told = server.rewritten(COMPLETIONS, completion("old"))
    assert told == {"model": "m", "prompt": [*HEAD, *ids("Old.\n\nWhy?")]}
    told = server.rewritten(COMPLETIONS, completion("old", "report"))
    assert told["prompt"] == [*HEAD, *ids("Old.\n\nThe report.\n\nWhy?")]
    server.names.learn("ids", {"tokens": [5, 6, 7], "style": PLAIN})
    assert server.rewritten(COMPLETIONS, completion("ids"))["prompt"] == [5, 6, 7, *ids("Why?")]
    assert server.refused(COMPLETIONS, completion("report", "ids"))[0] == 400
    assert "not learned for a chat" in server.refused(CHATS, chat("ids"))[1]


def test_a_system_prompt_must_be_the_one_they_were_learned_behind() -> None:
    server = Server()
    system = [{"role": "system", "content": "Be kind."}]
    asked = chat("report") | {"messages": [*system, {"role": "user", "content": "Why?"}]}
    status, message = server.refused(CHATS, asked)
    assert (status, "another system prompt" in message) == (400, True)
    head = ids("\x01[system]Be kind.<end>[user]")
    behind = {"tokens": [*head, *ids("Kind.\n\n")], "head": len(head), "style": CHAT}
    server.names.learn("kind", behind)
    expected = [*head, *ids("Kind.\n\nWhy?<end>[assistant]")]
    for body in (asked, chat("kind")):
        told = server.rewritten(CHATS, body | {"kdn": {"with": ["kind"]}})
        assert told["kv_transfer_params"]["prompt_token_ids"] == expected
    status, message = server.refused(CHATS, chat("report", "kind"))
    assert (status, "another head" in message) == (400, True)


def test_a_name_that_is_not_there_or_of_others() -> None:
    server = Server()
    names = server.names
    names.learn("theirs", entry("Secret.\n\n"), key=seal_key(b"another secret"))
    names.learn("elsewhere", entry("Text.\n\n"), model=b"n" * 16)
    names.learn("moved", entry("Text.\n\n"))
    names.manifests["stolen"] = names.manifests["moved"]  # sealed under another name
    forged = with_entry({}, "forged", MODEL, entry("Text.\n\n"), KEY)
    forged["models"][MODEL.hex()]["tokens"][-1] += 1
    names.manifests["forged"] = forged
    unknown = server.refused(CHATS, chat("unknown"))
    assert unknown == (404, "nothing was learned under the name 'unknown' here")
    for name in ("theirs", "stolen", "forged"):  # as if they were not there
        told = server.refused(CHATS, chat("report", name))
        assert told == (404, unknown[1].replace("unknown", name))
    status, message = server.refused(CHATS, chat("elsewhere"))
    assert (status, "another model" in message) == (404, True)


@pytest.mark.parametrize(
    "given",
    [
        {}, [], "report", 7, True, {"with": None}, {"with": []}, {"with": "report"},
        {"with": {"report": 1}}, {"with": [7]}, {"with": [None]}, {"with": [["report"]]},
        {"with": [""]}, {"with": ["../report"]}, {"with": ["a/b"]}, {"with": ["report\n"]},
        {"with": ["x" * 129]}, {"with": ["profile\0"]}, {"with": ["report"] * 65},
        {"with": ["report"], "tenant": "other"}, {"with": ["report"], "url": "http://evil"},
    ],
)  # fmt: skip
def test_what_is_not_a_list_of_names(given: Any) -> None:
    server = Server()
    for path, body in ((CHATS, chat()), (COMPLETIONS, completion())):
        status, message = server.refused(path, body | {"kdn": given})
        assert status == 400
        assert "expected" in message or "known is" in message
    assert not server.names.asked


@pytest.mark.parametrize(
    "change",
    [
        {"messages": None}, {"messages": []}, {"messages": "Why?"}, {"messages": [7]},
        {"messages": [{"role": "tool", "content": "x"}]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "user", "content": "@@kdn-question@@"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
        {"messages": [{"role": "user", "content": [7]}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
        {"tools": [{"type": "function"}]}, {"chat_template": "{{ evil }}"}, {"echo": True},
        {"chat_template_kwargs": {"a": 1}}, {"truncate_prompt_tokens": 5},
        {"truncate_prompt_tokens": 0}, {"add_generation_prompt": False},
        {"continue_final_message": True}, {"documents": [{"text": "x"}]},
        {"reasoning_effort": "low"}, {"add_special_tokens": True},
        {"kv_transfer_params": 7}, {"kv_transfer_params": {"kdn": 7}},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"kv_transfer_params": {"kdn": {"pieces": [[0, 1]]}}},
    ],
)  # fmt: skip
def test_chats_that_would_not_be_what_they_say(change: dict[str, Any]) -> None:
    assert Server().refused(CHATS, chat("report") | change)[0] == 400


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": None}, {"prompt": ["a", "b"]}, {"prompt": [[1, 2]]}, {"prompt": [1.5]},
        {"prompt": [True]}, {"prompt": [128]}, {"prompt": [-1]}, {"prompt": [2**70]},
        {"prompt": {"a": 1}}, {"prompt": "\ud800"}, {"suffix": "x"}, {"prompt_embeds": "x"},
        {"truncate_prompt_tokens": -1}, {"kv_transfer_params": [1]}, {"echo": True},
    ],
)  # fmt: skip
def test_completions_that_would_not_be_what_they_say(change: dict[str, Any]) -> None:
    assert Server().refused(COMPLETIONS, completion("report") | change)[0] == 400


def test_other_addresses_take_no_names() -> None:
    server = Server()
    for path in ("/v1/responses", "/v1/chat/completions/batch", "/invocations", "/tokenize"):
        status, message = server.refused(path, chat("report"))
        assert (status, CHATS in message) == (400, True)
    status, _, _ = server.post(f"/root{CHATS}", chat("report"), root_path="/root")
    assert status == 200


def test_prompts_that_are_too_long() -> None:
    server = Server(max_tokens=100)
    server.names.learn("long", entry("x" * 200))
    assert server.refused(CHATS, chat("long"))[0] == 400
    assert server.refused(CHATS, chat(*["report"] * 10))[0] == 400
    assert server.refused(COMPLETIONS, completion("report", prompt="x" * 90))[0] == 400
    status, message = server.refused(COMPLETIONS, completion("report", prompt="x" * 20_000))
    assert (status, "expected less" in message) == (400, True)  # it is not even tokenised
    assert server.refused(COMPLETIONS, completion("report", prompt=[5] * 90))[0] == 400
    assert server.post(COMPLETIONS, completion("report"))[0] == 200
    server.names.asked.clear()
    for number in range(60):
        server.names.learn(f"n{number}", entry("x" * 50))
    assert server.refused(CHATS, chat(*(f"n{number}" for number in range(60))))[0] == 400
    assert len(server.names.asked) == 8  # the others would not fit either


def test_a_long_head_counts_once() -> None:
    server = Server(max_tokens=100)
    head = [*HEAD, *ids("x" * 50)]
    for name in ("a", "b", "c"):
        server.names.learn(name, {"tokens": [*head, *ids(name)], "head": len(head), "style": CHAT})
    told = server.rewritten(COMPLETIONS, completion("a", "b", "c"))
    assert told["prompt"] == [*head, *ids("abcWhy?")]


@pytest.mark.parametrize(
    "what",
    [
        {}, {"tokens": []}, {"tokens": [128]}, {"tokens": [-1]}, {"tokens": ["x"]},
        {"tokens": "abc"}, {"tokens": [[1]]}, {"tokens": [1, 2], "head": 2},
        {"tokens": [1, 2], "head": -1}, {"tokens": [1, 2], "head": "1"},
        {"tokens": [1, 2], "head": True}, {"tokens": [1.5]}, {"tokens": None},
    ],
)  # fmt: skip
def test_manifests_that_make_no_sense(what: dict[str, Any]) -> None:
    server = Server()
    server.names.learn("odd", what)
    assert server.refused(COMPLETIONS, completion("odd"))[0] == 502


def test_manifests_of_another_kind() -> None:
    server = Server()
    for manifest in ({"models": 7}, {"models": {MODEL.hex(): 7}}):
        server.names.manifests["odd"] = manifest
        assert server.refused(COMPLETIONS, completion("odd"))[0] == 502


def test_a_vllm_that_takes_no_tokens_for_chats() -> None:
    server = Server(takes_chats=False)
    status, message = server.refused(CHATS, chat("report"))
    assert (status, COMPLETIONS in message) == (501, True)
    assert server.post(COMPLETIONS, completion("report"))[0] == 200


def test_names_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references_file, "RESOLVE_S", 0.05)
    server = Server()
    server.names.fault = UnavailableError("http://inside:8470 is away")
    status, message = server.refused(CHATS, chat("report"))
    assert (status, "inside" in message) == (503, False)
    server.names.fault = RuntimeError("a mistake of ours")
    status, message = server.refused(CHATS, chat("report"))
    assert (status, "mistake" in message) == (500, False)
    server.names.fault, server.names.takes_s = None, 60.0
    assert server.refused(CHATS, chat("report"))[0] == 503


def test_names_are_kept_for_some_seconds_and_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    for _ in range(3):
        server.rewritten(CHATS, chat("report", "faq", "report"))
    assert server.names.asked == ["report", "faq"]
    server.names.learn("report", entry("Another.\n\n"))
    server.clock_s += references_file.HELD_S
    told = server.rewritten(COMPLETIONS, completion("report"))
    assert told["prompt"] == [*HEAD, *ids("Another.\n\nWhy?")]
    monkeypatch.setattr(references_file, "MAX_HELD_TOKENS", 30)
    for number in range(20):
        server.names.learn(f"n{number}", entry("x" * 10))
        server.rewritten(COMPLETIONS, completion(f"n{number}"))
    held = server.referring.references._held
    assert list(held) == ["n19"]
    assert server.referring.references._held_tokens == len(HEAD) + 10
    server.names.learn("n19", entry("x" * 100))
    server.clock_s += references_file.HELD_S
    server.rewritten(COMPLETIONS, completion("n19"))
    assert (len(held), server.referring.references._held_tokens) == (0, 0)


def test_names_of_another_tenant_are_not_there(tmp_path: Path) -> None:
    async def resolve(node: Running, token: str, secret: bytes) -> Any:
        async with open_places(node.url, token=token) as places:
            references = References(places.names, MODEL, seal_key(secret), 128)
            return await references.resolve(["notes"], 1000)

    async def test(node: Running) -> None:
        async with open_places(node.url, token="ours") as places:
            told = with_entry({}, "notes", MODEL, entry("Ours.\n\n"), KEY)
            await places.names.change("notes", lambda _: told)
        [found] = await resolve(node, "ours", b"a secret")
        assert found.tokens.tolist() == [*HEAD, *ids("Ours.\n\n")]
        for token, secret, status in (
            ("theirs", b"a secret", 404), ("ours", b"another", 404), ("nobody", b"a secret", 503),
        ):  # fmt: skip
            with pytest.raises(Refusal) as refusal:
                await resolve(node, token, secret)
            assert refusal.value.status == status
            assert node.url not in refusal.value.message

    with_node(tmp_path, test, tenant("us", "ours"), tenant("them", "theirs"))


def transfer(**extra: Any) -> Any:
    return SimpleNamespace(kv_connector="KdnConnector", kv_connector_extra_config=extra)


def test_settings_are_those_of_the_connector() -> None:
    own = connector_settings(transfer(url="http://a:1", blend="ranges"))
    assert (own.session.where, own.blend) == (("http://a:1",), "ranges")
    inner = {"kv_connector": "KdnConnector", "kv_connector_extra_config": {"url": "http://b:1"}}
    many = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [{"kv_connector": "Other"}, inner]},
    )
    assert connector_settings(many).session.where == ("http://b:1",)
    for odd in (None, SimpleNamespace(kv_connector="Other", kv_connector_extra_config=None)):
        with pytest.raises(UnsupportedError, match="KdnConnector"):
            connector_settings(odd)


def test_the_servers_chat_template_is_used() -> None:
    chats = SimpleNamespace(chat_template="x", default_chat_template_kwargs={"thinks": False})
    state = SimpleNamespace(openai_serving_chat=chats)
    assert template_of(state) == {"chat_template": "x", "thinks": False}
    assert template_of(SimpleNamespace()) == {}


def test_a_server_that_cannot_resolve_names_says_so(tmp_path: Path) -> None:
    clock_s = [0.0]

    def opened(state: Any) -> OpenedReferences:
        return OpenedReferences(state, lambda: clock_s[0])

    async def refusal(references: OpenedReferences) -> Refusal:
        with pytest.raises(Refusal) as caught:
            await references.get()
        return caught.value

    async def test() -> None:
        config = SimpleNamespace(kv_transfer_config=transfer(url=str(tmp_path)), model_config=None)
        folder = opened(SimpleNamespace(vllm_config=config))
        assert "run a node" in (await refusal(folder)).message
        config.kv_transfer_config = None
        assert "run a node" in (await refusal(folder)).message  # not tried again yet
        clock_s[0] += 10.0
        assert "KdnConnector" in (await refusal(folder)).message
        await folder.close()
        nothing = opened(SimpleNamespace())
        assert (await refusal(nothing)).message.endswith("its log says why")
        await nothing.close()

    run(test())


def test_a_time_that_runs_out_within_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As anything else that fails, and unlike opening that takes long."""
    clock_s, faults = [0.0], [TimeoutError("the hub"), None]

    async def opening(_: OpenedReferences) -> Any:
        if (fault := faults.pop(0)) is not None:
            raise fault
        return "opened"

    async def slow(_: OpenedReferences) -> Any:
        await asyncio.sleep(60)

    async def test() -> None:
        monkeypatch.setattr(OpenedReferences, "_open", opening)
        one = OpenedReferences(None, lambda: clock_s[0])
        with pytest.raises(Refusal, match="not resolved"):
            await one.get()
        clock_s[0] += 10.0
        assert await one.get() == "opened"
        monkeypatch.setattr(OpenedReferences, "_open", slow)
        monkeypatch.setattr(opened_file, "OPEN_S", 0.01)
        late = OpenedReferences(None, lambda: clock_s[0])
        with pytest.raises(Refusal, match="yet"):
            await late.get()
        await late.close()

    run(test())


def test_what_fails_to_open_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again and again."""
    is_open: list[str] = []

    def open_places(*_: Any, **__: Any) -> Any:
        is_open.append("places")
        raise AssertionError("too early")

    def no_template(_: Any) -> Any:
        raise TypeError("of a vLLM that is not known")

    monkeypatch.setattr(opened_file, "open_places", open_places)
    monkeypatch.setattr(opened_file, "spec_of_model", lambda *_: None)
    monkeypatch.setattr(opened_file, "_tokenizer_of", lambda _: None)
    monkeypatch.setattr(opened_file, "template_of", no_template)
    config = SimpleNamespace(
        kv_transfer_config=transfer(url="http://a:1"), model_config=None, load_config=None
    )

    async def test() -> None:
        with pytest.raises(Refusal, match="log"):
            await OpenedReferences(SimpleNamespace(vllm_config=config)).get()

    run(test())
    assert not is_open


def test_names_of_few_tokens_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references_file, "MAX_HELD", 2)
    server = Server()
    for number in range(5):
        server.names.learn(f"n{number}", entry("x"))
        server.rewritten(COMPLETIONS, completion(f"n{number}"))
    assert list(server.referring.references._held) == ["n3", "n4"]
    assert server.referring.references._held_tokens == 2 * (len(HEAD) + 1)
