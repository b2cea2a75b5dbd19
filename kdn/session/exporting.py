"""What an export has to know of bitstreams (`kdn/places/export.py` itself can read none)."""

from __future__ import annotations

from kdn.codec.format import Bitstream
from kdn.codec.header import header_size
from kdn.errors import MismatchError
from kdn.places.export import Streams


def verify(key: bytes, etag: bytes, data: bytes) -> None:
    """Every byte of it, but for the seal, which takes the secret: readers verify that."""
    stream = Bitstream.parse_stored(data)
    if (stream.info.chunk_key, stream.stream_id) != (key, etag):
        raise MismatchError(f"expected the chunk {key.hex()}, found another stream")


STREAMS = Streams(verify, header_size)
