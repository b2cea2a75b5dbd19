"""A node serves stores over HTTP: `docs/protocol.md` is the authority."""
