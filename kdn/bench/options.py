"""Options that benchmarks share: refused at once, not after an hour of measuring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kdn.checked import (
    MAX_COUNT,
    MAX_SEED,
    checked_input,
    checked_number,
    checked_output,
    checked_plot,
    checked_text,
)
from kdn.errors import UnsupportedError


def count(least: int, help_: str) -> Any:
    return typer.Option(min=least, max=MAX_COUNT, help=help_)


def seed(help_: str) -> Any:
    return typer.Option(min=0, max=MAX_SEED, help=help_)


def _each(check: Callable[[Path], Path]) -> Callable[[Any], Any]:
    """For an option that may be given once, several times, or not at all."""

    def checked(value: Any) -> Any:
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                check(one)
        return value

    return checked


def files(help_: str) -> Any:
    """To be read."""
    return typer.Option(help=help_, callback=_each(checked_input))


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write all as JSON.", callback=_each(checked_output)),
]
SavedFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write all as JSON, row by row; a run that was stopped goes on from there.",
        callback=_each(checked_output),
    ),
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw it as PNG.", callback=_each(checked_plot))
]


def words(name: str, given: str, known: tuple[str, ...] | list[str]) -> list[str]:
    """Of a comma-separated list, each known."""
    found = [word.strip() for word in given.split(",")]
    for word in found:
        if word not in known:
            raise UnsupportedError(f"{name}: expected {', '.join(known)}, found {word!r}")
    return found


def numbers(name: str, given: str, least: float, most: float) -> list[float]:
    """Of a comma-separated list, each in [least, most]."""
    try:
        found = [float(word) for word in checked_text(name, given).split(",")]
    except ValueError:
        raise UnsupportedError(
            f"{name}: expected numbers, comma-separated, found {given!r}"
        ) from None
    return [checked_number(name, one, least, most) for one in found]


def device(name: str) -> str:
    """Where a model can run."""
    import torch

    try:
        torch.empty(1, device=name)
    # As torch says, by version and build, that there is no such device.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"device: expected one of this machine, {name!r}: {reason}"
        ) from None
    return name
