"""`kdn top` prints what a node says of itself, and lets nothing of it command the terminal."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdn.background import faults
from kdn.cli.main import main
from kdn.cli.top import board
from kdn.errors import NotAllowedError, StoreError
from tests.node.harness import Running, key_of, tenant, with_node


@pytest.fixture(autouse=True)
def _no_faults() -> None:
    """Other tests of this process make some on purpose, and a status tells of all."""
    faults.clear()


def printed(status: Any) -> str:
    console = Console(width=110, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(board(status, "http://node:8470"))
    return captured.get()


async def asked(node: Running, token: str | None = None) -> Any:
    return json.loads((await node.ask("GET", "/v1/status", token=token))[2])


def test_one_snapshot_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def test(node: Running) -> None:
        await node.put_chunk(1)
        await node.ask("GET", f"/v1/chunks/{key_of(1).hex()}")
        await asyncio.to_thread(top, "--once", "--url", node.url)

    def top(*flags: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["top", *flags])
        assert not ended.value.code

    with_node(tmp_path, test)
    said = capsys.readouterr().out
    assert "healthy" in said
    assert "public" in said
    assert "memory" in said


def test_it_takes_an_operators_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kdn.cli.remote import Whom
    from kdn.cli.top import run as run_top

    monkeypatch.setenv("KDN_CLIENT_TOKEN", "tok-reader-1b")

    async def test(node: Running) -> None:
        with pytest.raises(NotAllowedError) as refused:
            await asyncio.to_thread(run_top, Whom(url=node.url), True)
        assert "forbidden" in str(refused.value)
        assert "tok-reader-1b" not in str(refused.value)

    with_node(tmp_path, test, tenant("alice", "tok-reader-1b"))


def test_what_others_wrote_is_neither_markup_nor_a_command(tmp_path: Path) -> None:
    async def test(node: Running) -> Any:
        return await asked(node)

    status = with_node(tmp_path, test)
    hostile = copy.deepcopy(status)
    hostile["tenants"][0]["tenant"] = "[red]bob[/red]\x1b]0;owned\x07\u202e"
    problem = {"severity": "error", "code": "x", "message": "[bold]wrong\x1b[2J"}
    hostile["health"] = {"status": "error", "problems": [problem]}
    one = {"tenant": "a", "client": "\x9b31m", "sent_bytes": 1, "asked_bytes": 2, "seconds": 0.5}
    hostile["deliveries"] = {"number": 1, "longest": [one]}
    said = printed(hostile)
    assert "[red]bob[/red]" in said
    assert "[bold]wrong" in said
    assert not any(control in said for control in ("\x1b", "\x07", "\u202e", "\x9b"))


@pytest.mark.parametrize("answer", [{}, {"health": {}}, {"health": {"problems": 3}, "node": []}])
def test_whoever_is_no_node_is_refused(answer: Any) -> None:
    with pytest.raises(StoreError, match="expected the status of a node"):
        board(answer, "http://node:8470")
