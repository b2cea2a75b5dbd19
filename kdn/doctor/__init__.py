"""`kdn doctor`: is this machine and its configuration sound?

A check is a small function that looks at one thing and returns a `Finding`. `check.py` runs each
with a deadline and reports those that crash; `command.py` lists them all and prints what they
found. Checks only look: what they write to try a disk they remove again.
"""
