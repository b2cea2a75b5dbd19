"""Groups of commands whose code is imported when one of them is called, not when `kdn` starts.

Each command is an ordinary typer function somewhere else; the group knows its name, its address
("module:function") and one line of help, which is all that `--help` of the group shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


def lazy_group(commands: Mapping[str, tuple[str, str]]) -> typer.Typer:
    """A typer app of `{name: (address, help)}`."""

    # Typed Any: some releases of typer bring their own click, others use the installed one.
    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """Enough for listings and for "no such command"."""
            if cmd_name not in commands:
                return None
            return _command(cmd_name, _placeholder, commands[cmd_name][1])

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """Only the command that is about to run is imported."""
            name, placeholder, rest = super().resolve_command(ctx, args)
            if name is None:
                return name, placeholder, rest
            module, function = commands[name][0].split(":")
            return name, _command(name, getattr(import_module(module), function)), rest

    group = typer.Typer(cls=LazyGroup, no_args_is_help=True)
    group.callback()(_placeholder)
    return group


def _placeholder() -> None:
    pass


def _command(name: str, function: Callable[..., Any], summary: str | None = None) -> Any:
    single = typer.Typer(add_completion=False)
    single.command(name, help=summary)(function)
    return typer.main.get_command(single)
