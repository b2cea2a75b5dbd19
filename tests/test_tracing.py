"""Ids and spans by themselves: what is taken from outside, what follows a request, what is off."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from kdn import tracing
from kdn.errors import UnsupportedError
from tests.traces import recorded, trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
HOSTILE = (
    "", "00", GOOD + " ", GOOD + "-more", GOOD.upper(), GOOD.replace("00-", "ff-", 1), "x" * 10_000,
    f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-zz",
    f"00-{TRACE}-{SPAN}-01\r\nX: y", "\u0660\u0660-" + GOOD[3:],
)  # fmt: skip


@pytest.mark.parametrize("told", ["", "a b", "a\r\nX-Evil: 1", "x" * 129, "ä", None])
def test_an_id_from_outside_that_is_none_is_ignored(told: str | None) -> None:
    assert tracing.checked_id(told) == ""


def test_an_engines_id_becomes_one_that_may_stand_in_a_header() -> None:
    assert tracing.clean_id("chatcmpl-12:a.b_c") == "chatcmpl-12:a.b_c"
    cleaned = tracing.clean_id("a\r\nX: ä" + "y" * 500)
    assert tracing.checked_id(cleaned) == cleaned
    assert len(cleaned) == tracing.MAX_ID


def test_an_id_follows_tasks_and_threads_and_ends_with_its_request() -> None:
    async def work() -> list[str]:
        with tracing.named("r1"):
            task = asyncio.create_task(asyncio.to_thread(tracing.request_id))
            with tracing.named():
                inner = tracing.request_id()
        return [inner, await task, tracing.request_id()]

    assert asyncio.run(work()) == ["r1", "r1", ""]


def test_without_a_provider_every_span_is_the_same_nothing() -> None:
    with tracing.named("r1"), tracing.span("a", x=1) as span:
        assert span is tracing.span("b")
        assert tracing.outgoing() == {tracing.REQUEST_HEADER: "r1"}
        assert tracing.Request.begin("c").traceparent == ""
    assert tracing.outgoing() == {}


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys; from kdn import tracing\n"
        "with tracing.request('a') as r, tracing.span('b') as s: s.set(x=1); tracing.outgoing()\n"
        "with tracing.received('c', 'id', sys.argv[1], x=2): pass\n"
        "r.record('d', 1.0); tracing.Request.elsewhere('i', sys.argv[1]).traceparent\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code, GOOD], timeout=60).returncode == 0


def test_a_request_is_one_trace_whichever_task_works_on_it() -> None:
    with recorded() as spans:
        with spans.tracer.start_as_current_span("caller"):
            request = tracing.Request.begin("kdn.ask", "r1")

        def elsewhere() -> None:
            with request.resumed(), tracing.span("kdn.decode", chunks=2):
                later.append(tracing.Request.current())

        later: list[tracing.Request] = []
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        request.end()
        with later[0].resumed(), tracing.span("kdn.publish"):
            pass
        assert spans.parent_of(spans.one("kdn.ask")) == "caller"
        assert spans.parent_of(spans.one("kdn.decode")) == "kdn.ask"
        assert spans.parent_of(spans.one("kdn.publish")) == "kdn.decode"
        assert len({trace_of(span) for span in spans.spans}) == 1
        about = spans.one("kdn.decode").attributes
        assert about == {"kdn.chunks": 2, "kdn.request": "r1"}


def test_headers_carry_a_trace_from_one_process_to_another() -> None:
    with recorded() as spans:
        with tracing.request("client", "r1"):
            headers = tracing.outgoing()
        sent = headers[tracing.REQUEST_HEADER], headers[tracing.TRACE_HEADER]
        with tracing.received("server", *sent, tenant="t"):
            assert tracing.request_id() == "r1"
        assert spans.parent_of(spans.one("server")) == "client"
        assert trace_of(spans.one("server")) == trace_of(spans.one("client"))


@pytest.mark.parametrize("parent", HOSTILE)
def test_a_hostile_parent_is_ignored(parent: str) -> None:
    with recorded() as spans:
        with tracing.received("server", "a b", parent):
            assert tracing.request_id() == ""
        assert spans.one("server").parent is None
        assert tracing.Request.elsewhere("r", parent).traceparent == ""


def test_what_failed_tells_its_kind_and_not_its_text() -> None:
    with recorded() as spans:
        with pytest.raises(ValueError), tracing.span("bad"):
            raise ValueError("a secret")
        with pytest.raises(asyncio.CancelledError), tracing.span("cancelled"):
            raise asyncio.CancelledError
        assert spans.one("bad").status.description == "ValueError"
        assert not spans.one("bad").events
        assert spans.one("cancelled").status.is_unset


def test_what_is_over_can_still_be_recorded() -> None:
    with recorded() as spans:
        tracing.Request.elsewhere("r1", GOOD).record("kdn.hand_over", 0.25, tokens=5)
        one = spans.one("kdn.hand_over")
        assert one.end_time is not None
        assert one.start_time is not None
        assert one.end_time - one.start_time == 250_000_000
        assert trace_of(one) == int(TRACE, 16)


def test_tracing_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="otel"):
        tracing.start("kdn")


def test_start_sends_traces_by_the_sdk() -> None:
    """In a process of its own: a provider is for good. Nobody listens, and nothing waits for it."""
    code = (
        "from kdn import tracing; from opentelemetry import trace\n"
        "tracing.start('kdn-node'); provider = trace.get_tracer_provider()\n"
        "assert tracing.is_on() and provider.resource.attributes['service.name'] == 'kdn-node'\n"
        "tracing.start('again'); assert trace.get_tracer_provider() is provider\n"
        "import os; os._exit(0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("asked_for", [None, "parentbased_always_on"])
def test_a_share_of_what_nobody_traces_is_recorded(asked_for: str | None) -> None:
    """And all of what others trace; of everything if the variable says so. What is left out has no
    spans below it, here or elsewhere; the next request is drawn anew."""
    code = (
        "from kdn import tracing; tracing.start('kdn-node', 0.0)\n"
        f"for parent in (None, 'none of the right form', '{GOOD}'):\n"
        "    with tracing.received('a', 'r1', parent), tracing.span('b') as inner:\n"
        "        print(inner is not tracing._OFF and inner._own.is_recording())\n"
        "        flags = int(tracing.outgoing()[tracing.TRACE_HEADER][-2:], 16)\n"
        "        print(bool(flags & 1))\n"
        f"        with tracing.received('c', 'r2', '{GOOD}'), tracing.span('d') as below:\n"
        "            print(below is not tracing._OFF and below._own.is_recording())\n"
        "print(tracing.is_on())\n"
        "import os, sys; sys.stdout.flush(); os._exit(0)"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ |= {"OTEL_TRACES_SAMPLER": asked_for} if asked_for else {}
    told = subprocess.run(
        [sys.executable, "-c", code], timeout=60, env=environ, capture_output=True, text=True
    )
    every = str(asked_for is not None)
    left_out = [every, every, "True"]
    assert told.stdout.split() == [*left_out, *left_out, "True", "True", "True", "True"]
