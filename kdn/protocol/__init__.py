"""What travels between a node and its clients, as bytes: `docs/protocol.md`."""
