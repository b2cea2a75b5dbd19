"""The room between places and engines: `session.py` has its three verbs."""
