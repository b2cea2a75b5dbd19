"""Defaults that several doors share (`kdn.connect`, the command line, vLLM), each written once.
Those of configuration files are in `config.py`. Importing this is light."""

MODEL = "smollm2"
DEVICE = "auto"
"""A GPU if there is one; see `kdn/engines/device.py`."""
CODEC = "klt"
QUALITY = "default"
"""See `kdn/session/quality.py`."""
ENGINE_QUALITY = "high"
"""In a serving engine, where other requests go on from what one has loaded."""
STORED_QUALITY = "exact"
"""Of what is published: all levels, so that others may go on from it and publish that."""
MAX_NEW_TOKENS = 256
"""Of an answer."""
QUEUE_BYTES = 1 << 30
"""Of chunks that wait to be encoded."""
SPOOL_BYTES = 1 << 30
"""Of encoded chunks that wait on disk for a node that is away."""
REQUEST_LOG_BYTES = 16 << 20
"""Of what was decided for each request, on disk: some ten thousand requests."""
HOST_BYTES = 2 << 30
"""Of chunks, in memory that all engines of a host share."""
STATE_SPACING = 16
"""Chunks from one stored state of recurrent layers to the next: a state may be as large as the keys
and values of some thousand tokens."""
RESOLVE_S = 5.0
"""How long the addresses of a node's name are taken to be the same."""
