"""`kdn config`: the effective settings, where each came from, and new tokens."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kdn.config import SECRETS, Config, check_tenant_name, load_config


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
            has_password = item.name in ("url", "upstream") and "@" in value
            hidden = (item.name in SECRETS and value) or has_password
            shown.append((name, "(set)" if hidden else str(value), config.sources[name]))
    for tenant in config.tenants:
        told = f"{len(tenant.tokens)} tokens, weight {tenant.weight:g}"
        told += f", quota {tenant.quota_bytes or 'none'}, rate {tenant.requests_per_s or 'none'}"
        told += ", operator" if tenant.operator else ""
        shown.append((f"tenants.{tenant.name}", told, "file"))
    return shown


def print_new_token(tenant: str) -> None:
    """The token is shown once; only its hash goes into the file."""
    from kdn.node.tenants import new_token

    check_tenant_name(tenant)
    token, hashed = new_token()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"# Give this to {tenant}; it is not kept anywhere:", markup=False)
    console.print(f"# {token}", markup=False)
    console.print(f'[tenants.{tenant}]\ntokens = ["{hashed}"]', markup=False)
