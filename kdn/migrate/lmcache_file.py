"""An LMCache configuration, read with suspicion: its YAML file, or LMCACHE_* variables.

Nothing in it is run or resolved. YAML is read as plain data, without aliases: a small file of them
stands for one that fills any memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdn.checked import shown
from kdn.errors import FormatError, LimitError, UnsupportedError

MAX_BYTES = 1 << 20
MAX_SETTINGS = 1000
PREFIX = "LMCACHE_"
ALIASES = {
    "enable_xpyd": "enable_pd", "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port", "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host", "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role", "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports", "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}  # fmt: skip
"""Older names, and what LMCache 0.5 calls them."""
NOT_SETTINGS = ("config_file", "log_level", "use_experimental", "disable_banner")
"""Variables that say something about LMCache itself."""
_VARIABLE = re.compile(r"\s*(?:export\s+)?(LMCACHE_[A-Z0-9_]+)\s*=\s*(.*?)\s*")

Settings = dict[str, Any]


def read_file(path: Path) -> Settings:
    """FormatError and its kind say what is wrong with the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "cannot be opened"
        raise UnsupportedError(f"{shown(str(path))}: expected a file: {reason}") from None
    if len(data) > MAX_BYTES:
        raise LimitError(f"{path}: expected at most {MAX_BYTES} bytes, found more")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: expected UTF-8: {error.reason}") from None
    lines = [line for line in text.splitlines() if line.strip() and not _is_comment(line)]
    if lines and all(_VARIABLE.fullmatch(line) for line in lines):
        return from_variables(dict(_variable(line) for line in lines))
    return _named(_read_yaml(path, text))


def from_variables(environ: Mapping[str, str]) -> Settings:
    """What LMCACHE_* say; all else is left alone."""
    found = {
        name.removeprefix(PREFIX).lower(): _plain(value)
        for name, value in environ.items()
        if name.startswith(PREFIX)
    }
    return _named({name: value for name, value in found.items() if name not in NOT_SETTINGS})


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _variable(line: str) -> tuple[str, str]:
    found = _VARIABLE.fullmatch(line)
    assert found is not None, "only lines that match come here"
    value = found[2]
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    return found[1], value


def _plain(value: str) -> Any:
    """A number, a truth or a structure where the text is one, as LMCache takes them."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    return value


def _read_yaml(path: Path, text: str) -> Settings:
    try:
        import yaml
    except ImportError:
        raise UnsupportedError("reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise FormatError(f"{path}: expected no aliases (*{shown(event.anchor)})")
        told = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise FormatError(f"{path}{where}: expected YAML: {problem}") from None
    if told is None:
        return {}
    if not isinstance(told, dict):
        raise FormatError(f"{path}: expected settings, NAME: VALUE, found {type(told).__name__}")
    return told


def _named(told: Mapping[Any, Any]) -> Settings:
    """By the names of today. LMCache leaves out what is null."""
    if len(told) > MAX_SETTINGS:
        raise LimitError(f"expected at most {MAX_SETTINGS} settings, found {len(told)}")
    for name in told:
        if not isinstance(name, str):
            raise FormatError(f"expected names of settings, found {shown(name)}")
    return {ALIASES.get(name, name): value for name, value in told.items() if value is not None}
