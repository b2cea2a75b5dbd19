"""What this host holds of chunks, whatever form it has there.

Where the engine's cache lies in main memory, that is decoded values (host_memory.py): decoding
costs more than memory. Where it lies on a GPU that decodes, it is streams (host_streams.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from kdn.cache.keys import Chunk
from kdn.cache.spec import ModelSpec
from kdn.codec.base import Codec
from kdn.delivery.sink import Sink
from kdn.errors import KdnError
from kdn.session.delivered import Grade
from kdn.session.host_folder import OnChange
from kdn.session.host_memory import SHARED_MEMORY, HostMemory
from kdn.session.host_streams import HostStreams
from kdn.session.settings import SessionSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Held(Protocol):
    def looking(self, worst_kld: float) -> AbstractContextManager[Callable[[Chunk], bool]]:
        """Says of chunks whether they are held, no further off than that."""
        ...

    def deliver(
        self,
        chunks: Sequence[Chunk],
        sink: Sink,
        end: int,
        enough_kld: float,
        is_late: Callable[[], bool],
    ) -> tuple[Grade, ...]:
        """Bring the first of these chunks, as far as they are held well enough for a context up to
        `end`, into the sink; their grades. When it is late, no more are begun."""
        ...


def open_values(
    settings: SessionSettings,
    spec: ModelSpec,
    codec: Codec,
    dtype: torch.dtype,
    on_change: OnChange | None = None,
) -> HostMemory | None:
    """Decoded values of this host."""
    size, kld = settings.host_bytes, codec.expected_kld
    return _opened(
        settings, lambda place: HostMemory(place, spec, dtype, size, kld, on_change=on_change)
    )


def open_streams(
    settings: SessionSettings,
    codec: Codec,
    dtype: torch.dtype,
    on_change: OnChange | None = None,
) -> HostStreams | None:
    """Streams of this host."""
    size = settings.host_bytes
    return _opened(
        settings, lambda place: HostStreams(place, codec, dtype, size, on_change=on_change)
    )


def _opened(settings: SessionSettings, opening: Callable[[Path], T]) -> T | None:
    """A folder that was named must be good; without shared memory there is just no such thing."""
    folder = settings.host_folder or SHARED_MEMORY
    if settings.host_bytes == 0 or (settings.host_folder is None and not folder.is_dir()):
        return None
    try:
        return opening(folder)
    except (KdnError, OSError) as error:
        if settings.host_folder is not None:
            raise
        logger.warning("chunks are not shared on this host: %s", error)
        return None
