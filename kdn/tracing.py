"""What a request is called, and where its time goes: its id, and spans of OpenTelemetry.

Both belong to the current context (`contextvars`). They follow a request into the tasks and threads
that it begins, and to nodes in two headers, so that the log of a client, the log of a node and the
trace of both speak of the same request.

Tracing costs nothing until somebody wants it: this module never imports OpenTelemetry by itself. It
is on in a process that has configured a provider of its own, and after `start`, which configures
one. Off, a span is one shared object that does nothing.

Whatever comes from outside, an id or a parent span, is taken if it has exactly the right form. Else
it is ignored: a request is never refused for it.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from kdn.errors import UnsupportedError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

REQUEST_HEADER = "X-Kdn-Request"
TRACE_HEADER = "traceparent"
MAX_ID = 128
_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID}}}")
_NOT_OF_AN_ID = re.compile(r"[^A-Za-z0-9._:-]")
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_ATTRIBUTE = "kdn.request"

_request_id: ContextVar[str] = ContextVar("kdn_request_id", default="")
_is_left_out: ContextVar[bool] = ContextVar("kdn_is_left_out", default=False)
"""Whether nothing of the current request is recorded."""
_share = 1.0
"""How many of the requests that nobody else traces are recorded."""


# ids


def new_id() -> str:
    return secrets.token_hex(8)


def clean_id(told: str) -> str:
    """An engine's own id, in letters that may stand in a header and in a log."""
    return _NOT_OF_AN_ID.sub("_", told[:MAX_ID])


def checked_id(told: str | None) -> str:
    """An id from outside; empty if it is none."""
    return told if told is not None and _ID.fullmatch(told) else ""


def request_id() -> str:
    """Of the request that is being worked on here; empty outside of all requests."""
    return _request_id.get()


@contextmanager
def named(name: str = "") -> Iterator[str]:
    """Work on the request of this id; without one, on the current request, or on a new one."""
    name = name or _request_id.get() or new_id()
    token = _request_id.set(name)
    try:
        yield name
    finally:
        _request_id.reset(token)


# spans


class Span(Protocol):
    """A part of a request's time: `with span("kdn.decode", chunks=3) as one`."""

    def __enter__(self) -> Span: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None: ...
    def set(self, **attributes: str | float) -> None: ...


class _Off:
    """What nobody records."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, **attributes: str | float) -> None:
        pass


class _On:
    """The current span while it is entered. It is entered and left in one task."""

    def __init__(self, own: OtelSpan) -> None:
        self._own = own

    def __enter__(self) -> Span:
        from opentelemetry import context, trace

        self._token = context.attach(trace.set_span_in_context(self._own))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        from opentelemetry import context

        context.detach(self._token)
        end(self._own, error)

    def set(self, **attributes: str | float) -> None:
        self._own.set_attributes(_full_names(attributes))


_OFF = _Off()


def span(name: str, **attributes: str | float) -> Span:
    """A child of the current span."""
    tracer = _tracer()
    if tracer is None:
        return _OFF
    return _On(tracer.start_span(name, attributes=_full_names(attributes)))


def is_on() -> bool:
    return _tracer() is not None


def end(own: OtelSpan, error: BaseException | None = None) -> None:
    """Of what failed, the kind of error is told and no more: texts may come from anywhere."""
    if isinstance(error, Exception):  # to be cancelled is no failure
        from opentelemetry.trace import Status, StatusCode

        own.set_status(Status(StatusCode.ERROR, type(error).__name__))
    own.end()


def _full_names(attributes: Mapping[str, str | float]) -> dict[str, str | float]:
    found = {f"kdn.{name}": value for name, value in attributes.items()}
    if own := _request_id.get():
        found[_ATTRIBUTE] = own
    return found


# requests


class Request:
    """One request of an engine: an id, and the span that all others of it are under.

    Work on it `with request.resumed():`, in any task and as often as need be, but never across the
    `yield` of a generator: what is current belongs to whoever runs at that time.
    """

    def __init__(self, request_id: str, own: OtelSpan | None = None) -> None:
        self.id = request_id
        self._own = own

    @classmethod
    def begin(cls, name: str, request_id: str = "", parent: str = "") -> Request:
        """Of this id or a new one, under the current span, or under another process's (`parent`, as
        in the header)."""
        request_id = clean_id(request_id) or new_id()
        tracer = _tracer()
        if tracer is None:
            return cls(request_id)
        own = tracer.start_span(name, context=_remote(parent), attributes={_ATTRIBUTE: request_id})
        return cls(request_id, own)

    @classmethod
    def current(cls) -> Request:
        """For work that goes on later, in another task. It is not ended by this one."""
        tracer = _tracer()
        if tracer is None:
            return cls(_request_id.get())
        from opentelemetry import trace

        return cls(_request_id.get(), trace.get_current_span())

    @classmethod
    def elsewhere(cls, request_id: str, parent: str) -> Request:
        """One that another process began, and ends."""
        if not is_on() or (context := _remote(parent)) is None:
            return cls(request_id)
        from opentelemetry import trace

        return cls(request_id, trace.get_current_span(context))

    def __enter__(self) -> Request:
        """As long as it lasts. It is not current by that: see `resumed`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.end(error)

    @property
    def traceparent(self) -> str:
        """For another process; empty if nobody records it."""
        return "" if self._own is None else _traceparent(self._own)

    @contextmanager
    def resumed(self) -> Iterator[Request]:
        token = _request_id.set(self.id)
        attached: Any = None
        if self._own is not None:
            from opentelemetry import context, trace

            attached = context.attach(trace.set_span_in_context(self._own))
        try:
            yield self
        finally:
            if attached is not None:
                context.detach(attached)
            _request_id.reset(token)

    def record(self, name: str, seconds: float, **attributes: str | float) -> None:
        """A span that has ended just now, and took so long."""
        tracer = _tracer()
        if tracer is None:
            return
        with self.resumed():
            now_ns = time.time_ns()
            start_ns = now_ns - int(seconds * 1e9)
            one = tracer.start_span(name, attributes=_full_names(attributes), start_time=start_ns)
            one.end(now_ns)

    def end(self, error: BaseException | None = None) -> None:
        if self._own is not None:
            end(self._own, error)


@contextmanager
def request(name: str, request_id: str = "") -> Iterator[Request]:
    """One request from its beginning to its end, in one task."""
    with Request.begin(name, request_id) as own, own.resumed():
        yield own


# between processes


def outgoing() -> dict[str, str]:
    """Headers that tell a node of the current request."""
    headers = {}
    if own := _request_id.get():
        headers[REQUEST_HEADER] = own
    if _is_left_out.get():  # by others, too
        headers[TRACE_HEADER] = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
    elif is_on():
        from opentelemetry import trace

        if parent := _traceparent(trace.get_current_span()):
            headers[TRACE_HEADER] = parent
    return headers


@contextmanager
def received(
    name: str,
    request_id: str | None,
    parent: str | None,
    ago_s: float = 0.0,
    **attributes: str | float,
) -> Iterator[Span]:
    """A request that came with these headers, if it did, so long ago."""
    tokens = _request_id.set(checked_id(request_id)), _is_left_out.set(False)
    try:
        tracer = _tracer()
        above = _remote(parent) if tracer is not None and parent else None
        # Drawn before there is a span: making one and throwing it away cost a node 2 % of its
        # speed.
        is_left_out = tracer is not None and above is None and random.random() >= _share
        _is_left_out.set(is_left_out)
        if tracer is None or is_left_out:
            yield _OFF
            return
        from opentelemetry import context, trace

        own = tracer.start_span(
            name, above or context.Context(), trace.SpanKind.SERVER, _full_names(attributes),
            start_time=time.time_ns() - int(ago_s * 1e9),
        )  # fmt: skip
        with _On(own) as one:
            yield one
    finally:
        _request_id.reset(tokens[0])
        _is_left_out.reset(tokens[1])


def _traceparent(own: OtelSpan) -> str:
    about = own.get_span_context()
    if not about.is_valid:
        return ""
    return f"00-{about.trace_id:032x}-{about.span_id:016x}-{about.trace_flags:02x}"


def _remote(parent: str) -> Context | None:
    """The context of a span elsewhere; None: what was told is none."""
    match = _TRACEPARENT.fullmatch(parent)
    if match is None:
        return None
    from opentelemetry import context, trace

    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    about = trace.SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags & 1)
    )
    if not about.is_valid:  # all zeros
        return None
    return trace.set_span_in_context(trace.NonRecordingSpan(about), context.Context())


# on and off

_made: tuple[object, Tracer] | None = None
"""The provider that is configured, and its tracer."""


def _tracer() -> Tracer | None:
    """None: nobody has configured a provider in this process, or this request is left out."""
    global _made
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or _is_left_out.get():
        return None
    if not hasattr(trace, "get_tracer_provider"):  # it is being imported, by another thread
        return None
    provider = trace.get_tracer_provider()
    if _made is not None and _made[0] is provider:
        return _made[1]
    if isinstance(provider, trace.ProxyTracerProvider):
        return None
    _made = (provider, provider.get_tracer("kdn"))
    return _made[1]


def check_installed() -> None:
    """UnsupportedError if `start` would find nothing to start."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise UnsupportedError("tracing needs OpenTelemetry: pip install 'kdn[otel]'")


def start(service: str, share: float = 1.0) -> None:
    """Record traces, and send them where OTEL_EXPORTER_OTLP_ENDPOINT and its like say; unless this
    process has a provider already. Of received requests that nobody else traces, a share, unless
    OTEL_TRACES_SAMPLER says otherwise. UnsupportedError if OpenTelemetry is not installed."""
    global _share
    check_installed()
    if is_on():
        return
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service}
    _share = 1.0 if os.environ.get("OTEL_TRACES_SAMPLER") else share
    provider = TracerProvider(resource=Resource.create(own))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def stop() -> None:
    """Send what is left, in a process that ends without Python's own farewell."""
    if _made is not None and hasattr(_made[0], "shutdown"):
        _made[0].shutdown()
