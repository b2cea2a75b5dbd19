"""A request of vLLM's under its own id and its caller's span, from the scheduler to the worker."""

from __future__ import annotations

import pytest

from kdn import tracing
from kdn.engines.vllm.pace import Pace
from kdn.errors import UnsupportedError
from tests.engines.vllm_scheduling import World, load_of, request
from tests.traces import recorded, trace_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


def test_a_load_carries_its_requests_span_to_the_worker() -> None:
    with recorded() as spans:
        world = World()
        order = load_of(world, request("chatcmpl-1", 1000, trace_headers=HEADERS))
        with order.origin.resumed(), tracing.span("kdn.load"):
            assert tracing.request_id() == "chatcmpl-1"
        world.side.finished("chatcmpl-1")
        whole = spans.one("kdn.request")
        assert trace_of(whole) == trace_of(spans.one("kdn.load")) == int(TRACE, 16)
        assert spans.parent_of(spans.one("kdn.load")) == "kdn.request"
        assert whole.attributes == {"kdn.request": "chatcmpl-1"}


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "00-no"}, {"traceparent": 5}])
def test_without_headers_of_use_a_request_begins_its_own_trace(headers: object) -> None:
    with recorded() as spans:
        world = World()
        world.arrive(request("r", 1000, trace_headers=headers))
        world.side.finished("r")
        assert spans.one("kdn.request").parent is None


def test_off_an_order_has_the_id_alone() -> None:
    order = load_of(World(), request("evil\r\nX: y", 1000, trace_headers=HEADERS))
    assert order.trace == ""
    with order.origin.resumed():
        assert tracing.outgoing() == {tracing.REQUEST_HEADER: "evil__X:_y"}


def test_asked_tokens_are_counted() -> None:
    world = World()
    world.arrive(request("r", 1000))
    assert (world.side.counts["asked"], world.side.counts["asked_tokens"]) == (1, 1000)


def test_what_a_load_saved_is_told_by_the_best_steps() -> None:
    pace = Pace()
    assert pace.seconds(1000) == 0.0
    pace.note(1, 0.03)  # a step of answers says nothing of prompts
    pace.note(1000, 9.0)  # one that waited for something
    pace.note(1000, 2.0)
    assert pace.seconds(500) == 1.0


def test_settings() -> None:
    own = World(request_log_bytes=0, request_log="/tmp/log", tracing=True).side._settings.session
    assert (own.request_log_bytes, str(own.request_log), own.tracing) == (0, "/tmp/log", True)
    with pytest.raises(UnsupportedError, match="tracing"):
        World(tracing="yes")
