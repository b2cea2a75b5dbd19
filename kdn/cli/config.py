"""`kdn config`: the effective settings, where each came from, and new tokens."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kdn.config import SECRETS, TOKEN_LISTS, Config, check_tenant_name, load_config
from kdn.errors import UnsupportedError


def show_config(path: Path | None) -> None:
    config = load_config(path)
    table = Table("setting", "value", "from")
    for name, value, source in rows(config):
        table.add_row(name, value, source)
    Console().print(table)


def rows(config: Config) -> list[tuple[str, str, str]]:
    """(setting, value, source). Secrets are not shown, nor are hashes of tokens."""
    shown = []
    for section in ("node", "client"):
        settings = getattr(config, section)
        for item in fields(settings):
            name, value = f"{section}.{item.name}", getattr(settings, item.name)
            has_password = item.name in ("url", "upstream", "store") and "@" in value
            hidden = (item.name in SECRETS and value) or has_password
            shown.append((name, "(set)" if hidden else str(value), config.sources[name]))
    for tenant in config.tenants:
        counts = [f"{len(getattr(tenant, kind))} {kind}" for kind in TOKEN_LISTS]
        told = f"{', '.join(counts)}, weight {tenant.weight:g}"
        told += f", quota {tenant.quota_bytes or 'none'}, rate {tenant.requests_per_s or 'none'}"
        shown.append((f"tenants.{tenant.name}", told, "file"))
    return shown


def print_new_token(tenant: str, right: str) -> None:
    """The token is shown once; only its hash goes into the file."""
    from kdn.node.tenants import RIGHTS, new_token

    check_tenant_name(tenant)
    kinds = {known.name.lower(): kind for kind, known in RIGHTS.items()}
    if right not in kinds:
        raise UnsupportedError(f"right: expected one of {', '.join(kinds)}, found {right!r}")
    token, hashed = new_token()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"# Give this to {tenant}; it is not kept anywhere:", markup=False)
    console.print(f"# {token}", markup=False)
    console.print(f'[tenants.{tenant}]\n{kinds[right]} = ["{hashed}"]', markup=False)
