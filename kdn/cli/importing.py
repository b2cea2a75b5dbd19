"""`kdn import`: settings of other systems, as kdn's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kdn.checked import checked_choice
from kdn.errors import UnsupportedError


def lmcache_config(
    file: Annotated[
        Path | None, typer.Argument(help="LMCache's YAML file, or a file of LMCACHE_* variables.")
    ] = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="Also LMCACHE_* of this shell, which win.")
    ] = False,
    only: Annotated[str, typer.Option(help="node (TOML), vllm (JSON), or all.")] = "all",
) -> None:
    """Print kdn's configuration for what an LMCache configuration says, and what has no
    counterpart, and why."""
    from kdn.migrate.lmcache import translate
    from kdn.migrate.lmcache_file import from_variables, read_file
    from kdn.migrate.lmcache_text import engine_text, node_text, whole_text

    checked_choice("only", only, ("all", "node", "vllm"))
    if file is None and not environment:
        raise UnsupportedError("expected LMCache's file, or --environment")
    settings = {} if file is None else read_file(file)
    if environment:
        settings |= from_variables(os.environ)
    texts = {"node": node_text, "vllm": engine_text, "all": whole_text}
    typer.echo(texts[only](translate(settings)), nl=False)
