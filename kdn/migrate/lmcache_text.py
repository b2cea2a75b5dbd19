"""What `kdn import` prints: a TOML file for a node, and JSON for vLLM."""

from __future__ import annotations

import json
from typing import Any

from kdn.migrate.lmcache import Plan

HEAD = """\
# Made by `kdn import lmcache-config`. Caches of LMCache cannot be read: kdn begins empty.
"""


def node_text(plan: Plan) -> str:
    """A whole `kdn.toml`, with what is to be known as comments."""
    lines = [HEAD, "[node]"]
    lines += [f"{name} = {_toml(value)}" for name, value in plan.node.items()]
    if not plan.node:
        lines.append("# nothing to set: `kdn node` works without a configuration")
    lines += ["", "# What each setting of LMCache became, where there is something to say:"]
    lines += [f"# - {_comment(name)}: {_comment(why)}" for name, why in plan.notes]
    return "\n".join(lines) + "\n"


def transfer_config(plan: Plan) -> dict[str, Any]:
    """For vLLM's `--kv-transfer-config`."""
    return {
        "kv_connector": "KdnConnector",
        "kv_connector_module_path": "kdn.engines.vllm",
        "kv_role": plan.role,
        "kv_connector_extra_config": plan.engine,
    }


def engine_text(plan: Plan) -> str:
    return json.dumps(transfer_config(plan), indent=1) + "\n"


def whole_text(plan: Plan) -> str:
    """Both, as one valid TOML file."""
    head = "# For vLLM: --kv-transfer-config '...' (`--only vllm` prints it alone)\n"
    engine = "".join(f"# {line}\n" for line in engine_text(plan).splitlines())
    return f"{node_text(plan)}\n{head}{engine}"


def _toml(value: Any) -> str:
    """JSON's texts and numbers are TOML's, too."""
    return json.dumps(value)


def _comment(text: str) -> str:
    """One line, whatever a file of others has in it."""
    return "".join(one if one.isprintable() else "?" for one in text)[:300]
