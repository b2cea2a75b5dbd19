"""How much one request may ask for, and how long its answer may be (`docs/protocol.md`): what a
node refuses, and what clients keep to. Each is written here once; a frame's are in `frames.py`."""

MAX_SPANS = 4096
"""Keys of one lookup, spans of one read."""
MAX_OFFSET = 2**63
"""Where a span may begin or end."""
MAX_HEAD_BYTES = 65_536
"""Of one key of a lookup."""
MAX_HEADS_BYTES = 16 << 20
"""Of all keys of a lookup together: their number times `head_bytes`."""
MAX_QUESTION_BYTES = 2 << 20
"""Of the JSON of a lookup or read."""
MAX_CONTAINERS = 1 << 14
"""Lists and objects in a JSON body, which take 25 times their bytes: a read of the most spans has a
quarter of them."""
MAX_SAVED_S = 1e9
"""Seconds that an object says it saves."""
MAX_RATE = 1e15
"""Bytes a second of a link that somebody asks about."""
MAX_MANIFEST_BYTES = 8 << 20
"""A million tokens with room to spare. A node reads JSON in one go, 11 ms a MiB."""
MAX_MANIFEST_KEYS = 8192
"""Chunks that one manifest names: two million tokens."""
MAX_VERSION = 2**53
"""Of a name."""
MAX_SEEN = 10**18 - 1
"""Of a sequence that a client has seen."""
MAX_LISTED = 1000
"""Objects or names on one page of a list."""
MAX_JSON_BYTES = 4 << 20
"""Of an answer in JSON: a page of a list and anything shorter."""
MAX_REPORT_BYTES = 64 << 20
"""Of the answer to a deleted name: all keys that any version of it used."""
MAX_CHUNK_BYTES = 256 << 20
"""Of a stream, or any other object: what clients read, and a node takes unless told otherwise."""
MAX_PROFILE_BYTES = 2 << 30
"""Of a codec's profile."""
SLOWEST_BYTES_S = 1 << 20
"""A request of many bytes has as much longer as they take at this rate."""
