"""Spans as OpenTelemetry's own SDK records them, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@contextmanager
def recorded() -> Iterator[Recorded]:
    """A provider is configured meanwhile. (For good, it could be only once in a process.)"""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer_provider", lambda: provider)
        yield Recorded(exporter, provider.get_tracer("test"))
    provider.shutdown()


class Recorded:
    def __init__(self, exporter: InMemorySpanExporter, tracer: Any) -> None:
        self._exporter, self.tracer = exporter, tracer

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [found] = self.named(name)
        return found

    def parent_of(self, span: ReadableSpan) -> str:
        """Its name; empty: it has none."""
        if span.parent is None:
            return ""
        [found] = [one for one in self.spans if id_of(one) == span.parent.span_id]
        return found.name


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id
