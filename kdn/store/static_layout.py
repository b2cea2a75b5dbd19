"""The files of an export (`docs/cluster.md`, "A CDN or any web server"): names, and the index.

Chunks follow each other, and contexts that begin alike share their first chunks: so they are trees.
A tree is cut into pages. A page is a file that is named by the key of its first chunk and lists
chunks in order, each after the one it follows: key, stream, size, and the beginning of the stream,
as a node's answer to a lookup does, in the same frames (`docs/protocol.md`). Two kinds of frames
have no object (404):

- After a chunk: what follows it is in other pages. The data are their keys; without any there are
  too many to list, and the next chunk's own key is the one to try.
- Alone in a file: this chunk is in the page whose key is the data. Every chunk that does not begin
  a page has such a file, so that its page is found from any chunk.

Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from xxhash import xxh3_64_intdigest

from kdn.errors import FormatError, LimitError, TruncatedError
from kdn.protocol import frames
from kdn.protocol.frames import MAX_ETAG_BYTES, MISS, OK, Frame
from kdn.protocol.limits import MAX_CHUNK_BYTES
from kdn.store.base import Entry, Hints

FORMAT = "kdn export"
VERSION = 1
ROOT_FILE = "kdn-export.json"
"""What this is, and which version of it. Small: every reader asks for it once."""
NAMES_FILE = "names.json"
LIST_FILE = "chunks.list"
"""All chunks, in frames without data, in order of their keys. On the path of no request."""

KEY_BYTES = 16
MAX_ROOT_BYTES = 64 << 10
MAX_NAMES_BYTES = 64 << 20
MAX_LIST_BYTES = 1 << 30
MAX_PAGE_BYTES = 4 << 20
MAX_HEAD_BYTES = 4096
"""Of a stream, in a page. What is missing of a longer header is read from the stream's own file."""
MAX_PAGE_FRAMES = 4096
MAX_ONWARD = 4096
"""Pages that are listed after a chunk: 64 KiB."""


def chunk_path(key: bytes, etag: bytes) -> str:
    """Named by its stream, too: another stream of the same chunk is another file. So whoever keeps
    a copy may keep it for ever, and bytes of two never meet."""
    return f"chunks/{key.hex()[:2]}/{key.hex()}-{etag.hex()}"


def index_path(key: bytes) -> str:
    return f"index/{key.hex()[:2]}/{key.hex()}"


def profile_path(key: bytes) -> str:
    return f"profiles/{key.hex()}"


def name_path(name: str) -> str:
    return f"names/{name}.json"


@dataclass
class Page:
    """What an index file says, or as much of it as came."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    """In the file's order, each with the beginning of its stream."""
    onward: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By a chunk's key: the pages of what follows it; none, if there are too many."""
    instead: bytes | None = None
    """The page to look at, if this is none."""
    parsed_bytes: int = 0


def pack_page(entries: Sequence[Entry], onward: Mapping[bytes, Sequence[bytes]]) -> bytes:
    parts: list[bytes] = []
    number = 0
    for entry in entries:
        parts.append(_object(number, entry, entry.head[:MAX_HEAD_BYTES]))
        number += 1
        if entry.key in onward:
            pages = onward[entry.key]
            parts.append(_mark(number, entry.key, pages if len(pages) <= MAX_ONWARD else ()))
            number += 1
    return b"".join(parts)


def pack_pointer(key: bytes, page: bytes) -> bytes:
    """The file of a chunk that does not begin a page."""
    return _mark(0, key, [page])


def pack_list(entries: Sequence[Entry]) -> bytes:
    return b"".join(_object(number, entry, b"") for number, entry in enumerate(entries))


def parse_list(body: bytes) -> list[Entry]:
    return [_entry(frame) for frame, _ in frames.split(body) if frame.status == OK]


def parse_page(name: bytes, body: bytes, *, complete: bool) -> Page:
    """The index file of chunk `name`. Where it is not `complete`, frames that came in part are left
    for later. FormatError if it is not one."""
    page, view = Page(), memoryview(body)
    for number in range(len(body) // frames.FIXED_BYTES + 1):
        try:
            frame, data = next(frames.split(view[page.parsed_bytes :]))
        except StopIteration:
            break
        except TruncatedError:
            if complete:
                raise
            break
        if frame.number != number or (number == 0 and frame.key != name):
            raise FormatError(f"expected frame {number} of the index of {name.hex()}")
        if number >= MAX_PAGE_FRAMES:
            raise LimitError(f"expected at most {MAX_PAGE_FRAMES} frames of an index")
        page.parsed_bytes += frame.head_bytes + frame.length
        _take(page, frame, bytes(data))
    if complete and not page.entries and page.instead is None:
        raise FormatError(f"expected the index of {name.hex()}, found nothing")
    return page


def _take(page: Page, frame: Frame, data: bytes) -> None:
    if frame.status == OK:
        page.entries[frame.key] = replace(_entry(frame), head=data)
        return
    if frame.status != MISS or len(data) % KEY_BYTES:
        raise FormatError(f"expected keys of pages, found {frame.status}, {len(data)} bytes")
    keys = tuple(data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))
    if frame.key in page.entries:
        page.onward[frame.key] = keys
    elif frame.number or len(keys) != 1:
        raise FormatError("expected one page to look at instead")
    else:
        page.instead = keys[0]


def _entry(frame: Frame) -> Entry:
    if frame.object_bytes > MAX_CHUNK_BYTES:
        raise LimitError(f"expected at most {MAX_CHUNK_BYTES} bytes, found {frame.object_bytes}")
    if len(frame.key) != KEY_BYTES or not 1 <= len(frame.etag) <= MAX_ETAG_BYTES:
        raise FormatError(f"expected the key and stream of a chunk, found {frame.key.hex()}")
    hints = Hints(frame.parent or None, frame.saved_s)
    return Entry(frame.key, frame.etag, frame.object_bytes, hints)


def _object(number: int, entry: Entry, data: bytes) -> bytes:
    frame = Frame(
        number, OK, entry.key, entry.etag, entry.hints.parent or b"", entry.size_bytes, 0,
        len(data), entry.hints.saved_s, xxh3_64_intdigest(data),
    )  # fmt: skip
    return frames.pack(frame) + data


def _mark(number: int, key: bytes, pages: Sequence[bytes]) -> bytes:
    data = b"".join(pages)
    checksum = xxh3_64_intdigest(data)
    return frames.pack(Frame(number, MISS, key, length=len(data), checksum=checksum)) + data
