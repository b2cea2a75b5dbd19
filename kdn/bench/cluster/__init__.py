"""`kdn bench cluster`: everything beyond one machine, real but small, on this one.

- `command.py`: the command; `plan.py`: how much of everything; `rows.py`: what was measured, saved
  as it comes; `report.py`: its tables.
- Part a, `speed.py`: shards, nodes and clients, by `crowd.py`; beside reading the same bytes from
  the servers directly, by `raw.py`. `shards.py` starts clusters of any size.
- Part b, `faults.py`: servers are killed and cut off under the load of `ledger.py`, which knows
  what was acknowledged.
- Part c, `regions.py`: regions over the shaped links of `long_link.py`; `linearizable.py` lets
  clients of several regions change names while links (`link.py`) and nodes (`processes.py`) fail,
  and `history.py` checks what they were told.
"""
