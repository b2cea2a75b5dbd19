"""The command line: arguments, and wiring the parts together.

`kdn --help` must answer at once, so nothing heavy (torch, transformers) is imported until a command
really runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kdn.cli.lazy import lazy_group
from kdn.errors import KdnError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Knowledge delivery network: what one model instance has read, every other one knows.",
)

bench = lazy_group(
    {
        "codec": ("kdn.bench.codec:run", "Rate, quality and speed of every codec on a real model."),
        "layering": ("kdn.bench.layering:run", "What levels cost klt against coding at once."),
    }
)
app.add_typer(bench, name="bench", help="Measure on real data, with tables, JSON and plots.")

FILE_OPTIONS = ("--text", "--calibration")
"""Options that take one or more files; so a command's own arguments come before them."""

ModelOption = Annotated[str, typer.Option(help="smollm2, a local folder, or a name on the hub.")]


@app.command()
def demo(
    model: ModelOption = "smollm2",
    text: Annotated[
        Path | None, typer.Option(help="A document to read instead of Python's manual.")
    ] = None,
    context: Annotated[int, typer.Option(min=512, help="Tokens of it to read.")] = 3072,
) -> None:
    """Let a real model read a document; encode, decode and compare its KV cache."""
    from kdn.cli.demo import run

    run(model, text, context)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="smollm2, a local folder, or a name on the hub.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Files to learn from; by default what Python carries.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the profile.")] = None,
) -> None:
    """Make the profile that the klt codec needs for a model."""
    from kdn.calibrate import run

    run(model, text=text, out=out)


def spread(arguments: list[str]) -> list[str]:
    """`--text A B` as `--text A --text B`: so a shell pattern may follow, as in `--text *.txt`."""
    result: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("-"):
            option = argument
        elif option in FILE_OPTIONS and result[-1] != option:
            result.append(option)
        result.append(argument)
    return result


def main() -> None:
    """Entry point: what kdn refuses is one clear line, not a traceback."""
    try:
        app(spread(sys.argv[1:]))
    except KdnError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, soft_wrap=True).print(Text(f"kdn: {error}", style="red"))
        sys.exit(1)


if __name__ == "__main__":
    main()
