"""How much one request may ask for (`docs/protocol.md`): what a node refuses, and what clients keep
to. Each is written here once."""

MAX_SPANS = 4096
"""Keys of one lookup, spans of one read."""
MAX_HEAD_BYTES = 65_536
"""Of one key of a lookup."""
MAX_HEADS_BYTES = 16 << 20
"""Of all keys of a lookup together: their number times `head_bytes`."""
MAX_MANIFEST_BYTES = 8 << 20
"""A million tokens with room to spare. A node reads JSON in one go, 11 ms a MiB."""
MAX_MANIFEST_KEYS = 8192
"""Chunks that one manifest names: two million tokens."""
