"""Long requests take turns on the event loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdn.node import batch
from kdn.protocol.frames import split
from tests.node.harness import Running, key_of, tenant, with_node


@pytest.mark.parametrize("question", ["lookup", "read"])
def test_many_keys_are_gone_through_in_turns(
    tmp_path: Path, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices of no length there is a turn for every key, and the answer is the same."""
    for name in ("LOOKUP_SLICE_S", "READ_SLICE_S"):
        monkeypatch.setattr(batch, name, 0.0)
    for name in ("SEEN", "SENT"):
        monkeypatch.setattr(batch, name, 1)
    keys = [key_of(number).hex() for number in range(600)]
    asked = {"keys": keys} if question == "lookup" else {"spans": [{"key": key} for key in keys]}

    async def test(node: Running) -> None:
        taken: list[str] = []
        wait = node.node.depot.turns.wait

        async def counted(tenant: str) -> None:
            taken.append(tenant)
            await wait(tenant)

        node.node.depot.turns.wait = counted
        await node.put_chunk(7, token="a")
        body = json.dumps(asked).encode()
        status, _, answer = await node.ask("POST", f"/v1/{question}", body, "a")
        assert status == 200
        found = [frame.number for frame, _ in split(answer) if frame.status == 200]
        assert found == [7]
        assert len(taken) > 1200
        assert set(taken) == {"ann"}

    with_node(tmp_path, test, tenant("ann", "a"), tenant("bob", "b"))
