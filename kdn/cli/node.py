"""`kdn node`: run a node in this process until it is told to stop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdn.config import load_config


def run(path: Path | None, flags: Mapping[str, Any]) -> None:
    import uvloop

    from kdn.node.logs import log_to
    from kdn.node.server import check_exposure, serve

    config = load_config(path, flags)
    check_exposure(config)
    log_to(None, config.node.log_level)
    uvloop.run(serve(config))
