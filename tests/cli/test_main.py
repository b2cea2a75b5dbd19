"""The command line answers at once, and what kdn refuses is one line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kdn.cli import main as cli
from kdn.cli.lazy import lazy_group
from kdn.errors import UnsupportedError

HEAVY = (
    "torch", "transformers", "numba", "numpy", "safetensors", "aiohttp", "uvloop", "asyncio",
    "xxhash", "prometheus_client", "sqlite3", "redis", "obstore", "zmq", "matplotlib", "triton",
    "vllm", "opentelemetry",
)  # fmt: skip
"""`import kdn` takes 5 ms and `kdn --help` 200 ms without these; torch alone takes seconds."""


def kdn(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kdn.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def test_help_names_the_commands() -> None:
    shown = kdn("--help").stdout
    assert all(name in shown for name in ("demo", "calibrate", "bench"))


@pytest.mark.parametrize("group", [["--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(group: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['kdn', *{group!r}]\n"
        "from kdn.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"sys.exit(', '.join(set({HEAVY!r}) & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "Usage" in found.stdout
    assert found.stderr.strip() == ""


def test_importing_kdn_imports_nothing_heavy() -> None:
    heavy = {*HEAVY, "rich", "typer"}
    code = f"import sys, kdn; print(sorted({heavy!r} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_an_error_of_kdn_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: list[str]) -> None:
        raise UnsupportedError("[no] such " + "long " * 40 + "line")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["kdn: [no] such " + "long " * 40 + "line"]


def test_an_error_of_kdn_from_the_shell() -> None:
    found = kdn("demo", "--text", "/no/such/file", check=False)
    assert found.returncode == 1
    assert found.stderr.startswith("kdn: ")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("bench codec --text a b --context 9", "bench codec --text a --text b --context 9"),
        ("calibrate m --text a --text b c", "calibrate m --text a --text b --text c"),
        ("bench codec --calibration a b", "bench codec --calibration a --calibration b"),
        ("bench codec --json a b", "bench codec --json a b"),
        ("demo --text a", "demo --text a"),
        ("demo --text=a b", "demo --text=a b"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_several_files_after_one_option(given: str, understood: str) -> None:
    assert cli.spread(given.split()) == understood.split()


def test_a_lazy_command_is_imported_only_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def import_module(name: str) -> Any:
        calls.append(name)
        return sys.modules[__name__]

    monkeypatch.setattr("kdn.cli.lazy.import_module", import_module)
    app = typer.Typer()
    app.add_typer(lazy_group({"greet": ("somewhere.heavy:greet", "Say hello.")}), name="group")
    app.command("other")(lambda: None)
    runner = CliRunner()

    shown = runner.invoke(app, ["group", "--help"])
    assert "Say hello." in shown.output
    assert runner.invoke(app, ["group", "nobody"]).exit_code == 2
    assert calls == []

    shown = runner.invoke(app, ["group", "greet", "--help"])
    assert "Greets somebody" in shown.output
    assert "--loud" in shown.output
    shown = runner.invoke(app, ["group", "greet", "Ada", "--loud"])
    assert shown.output == "HELLO ADA\n"
    assert calls == ["somewhere.heavy"] * 2


def greet(name: str, loud: bool = False) -> None:
    """Greets somebody."""
    text = f"Hello {name}"
    typer.echo(text.upper() if loud else text)
