"""Absurd values for every argument of every command: refused in a line, before anything heavy.

The commands are found by walking the tree, so a new option is covered from its first day on. What
would take long (models, processes, serving) is a closed door here: a named error of its own.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from kdn.cli import main as cli
from kdn.errors import KdnError, ModelUnavailableError

ABSURD = ("", "0", "nan", "1" + "0" * 30, "no/such/file", "a,b", "\udcff", "a\0b", "x" * 5000,
          "http://", "http://u:p@h", "ftp://h", "http://h:99999", "FOLDER", "NOT_UTF8", "EMPTY",
          "UNDER_FILE")  # fmt: skip
NOT_NUMBERS = ("", "-1", "nan", "inf", "-inf", "1e400", "1" + "0" * 30, "x", "\udcff")
SAMPLES = {
    "name": "handbook", "file": "TEXT", "question": "what?", "prompt_file": "TEXT", "what": "x",
    "text": "TEXT",
    "model": "smollm2", "requests": "REQUESTS", "traces": "TRACES", "prefix": "",
    "place": "http://127.0.0.1:9", "folder": "out",
}  # fmt: skip
"""Of arguments that must be given."""
CLOSED = "closed for this test"


make = typer.main.get_command
TREE = make(cli.app)
"""typer makes it anew whenever it is called, which takes far longer than to refuse a value."""


class ClosedError(KdnError):
    """Here something heavy would begin."""


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if not hasattr(command, "list_commands"):
            yield path, command
            return
        context = command.context_class(command)
        for name in command.list_commands(context):
            yield from walk(command.resolve_command(context, [name])[1], (*path, name))

    return walk(TREE, ())


def kind_of(parameter: Any) -> str:
    """Some releases of typer bring their own click, others use the installed one."""
    return str(getattr(parameter, "type_descriptor", None) or parameter.type)


def arguments(command: Any, tried: Any, value: str, files: Mapping[str, str]) -> list[str]:
    """All that must be given, and `value` for one."""
    options, rest = [], []
    for one in command.params:
        given = value if one is tried else SAMPLES[one.name] if one.required else None
        if given is None:
            continue
        given = files.get(given, given)
        if one.param_type_name == "option":
            options.append(f"{one.opts[0]}={given}")
        else:
            rest.append(given)
    return [*options, "--", *rest]


COMMANDS = dict(commands())
CASES = [
    pytest.param(path, parameter.name, id=f"{'-'.join(path)}-{parameter.name}")
    for path, command in COMMANDS.items()
    for parameter in command.params
    if not getattr(parameter, "is_flag", False) and parameter.name != "help"
]


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Doors closed; the files that words in capitals stand for."""
    import torch

    from kdn.node import server

    def closed(*arguments: Any, **named: Any) -> Any:
        raise ClosedError(CLOSED)

    async def serve(config: Any, queue: Any) -> None:
        async with server.open_node(config) as node, server.listen(config, node):
            closed()

    def no_model() -> Path:
        raise ModelUnavailableError(CLOSED)

    for name in [name for name in os.environ if name.startswith("KDN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(
        typer.main, "get_command", lambda app: TREE if app is cli.app else make(app)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KDN_CLIENT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(subprocess, "Popen", closed)
    work = (
        "processes.ProcessPoolExecutor",
        "cache.replay",
        "node.bench",
        "delivery.command.run_job",
    )
    for address in work:
        monkeypatch.setattr(f"kdn.bench.{address}", closed)
    # `kdn node` gives loggers a stream of this test, and keeps what they say from others.
    for logger in map(logging.getLogger, ("", "kdn", "aiohttp", "asyncio")):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", logger.propagate)
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", closed)
    monkeypatch.setattr("kdn.engines.models.smollm2_folder", no_model)
    folder = tmp_path / "given"
    (folder / "traces").mkdir(parents=True)
    files = {"TEXT": b"words " * 2000, "NOT_UTF8": b"\xff\xfe\x00", "EMPTY": b""}
    files["REQUESTS"] = b'{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}\n' * 3
    (folder / "traces" / "one.csv").write_text("t_s,mbps\n0,100\n1,50\n")
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    words = {name: str(folder / name) for name in files}
    return words | {
        "FOLDER": str(folder), "TRACES": str(folder / "traces"),
        "UNDER_FILE": str(folder / "TEXT" / "x"),
    }  # fmt: skip


def run(given: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status, and what was said on stderr."""
    try:
        cli.main(given)
    except SystemExit as stop:
        return int(stop.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().err


@pytest.mark.parametrize(("path", "name"), CASES)
def test_absurd_values(
    path: tuple[str, ...],
    name: str,
    closed: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = COMMANDS[path]
    [tried] = [one for one in command.params if one.name == name]
    is_number = re.search(r"\b(int|float|integer)\b", kind_of(tried), re.IGNORECASE) is not None
    for value in ("0", *NOT_NUMBERS) if is_number else ABSURD:
        given = [*path, *arguments(command, tried, value, closed)]
        try:
            code, said = run(given, capsys)
        except Exception as error:
            raise AssertionError(f"{given} is a traceback: {error!r}") from error
        assert code in (0, 1, 2), given
        assert "Traceback" not in said, given
        if code == 1:
            assert said.splitlines()[-1].startswith("kdn: "), given
            assert len(said.splitlines()) == 1 or CLOSED in said, given
        if is_number and value in NOT_NUMBERS:
            assert code, given
            assert CLOSED not in said, f"{given} is refused too late"


def test_every_command_is_tried() -> None:
    assert {"ask", "node", "bench"} <= {path[0] for path in COMMANDS}
    assert len(CASES) > 80


def test_the_deadline_that_was_a_traceback(
    closed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(["ask", "handbook", "what?", "--deadline", "0"], capsys)
    assert (code, said) == (1, "kdn: deadline: expected more than 0 seconds, found 0.0\n")


def test_a_missing_profile_that_was_a_traceback(
    closed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(["bench", "codec", "--profile", "no/such/file"], capsys)
    assert code == 1
    assert said.startswith("kdn: 'no/such/file': expected a file: No such file")
