"""A region: a node with another one, the centre, behind it. See `docs/cluster.md`.

It keeps what it fetched, sends upward what was put here, and follows the centre's names.
"""
