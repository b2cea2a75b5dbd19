"""The reference of the documentation site, made from the code: it cannot go stale.

Four pages: what `import kdn` gives, the command line, the settings, and the HTTP API. Each is plain
Markdown; nothing here knows MkDocs.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

Page = tuple[str, str]
"""Where it lies below docs/, and its text."""
MAX_LINE = 90
_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def pages() -> Iterator[Page]:
    yield "reference/python.md", python()
    yield "reference/commands.md", commands()
    yield "reference/settings.md", settings()
    yield "reference/http.md", http()


def python() -> str:
    """Every public name of `import kdn`."""
    import kdn

    parts = ["# Python", inspect.getdoc(kdn) or ""]
    parts += [_described(name, getattr(kdn, name)) for name in sorted(kdn.__all__)]
    return "\n\n".join(parts) + "\n"


def _described(name: str, what: Any) -> str:
    parts = [f"## `{name}`"]
    if inspect.isclass(what) and not issubclass(what, Exception) and not is_dataclass(what):
        parts += [inspect.getdoc(what) or "", *_methods(what)]
    elif is_dataclass(what):
        parts += [inspect.getdoc(what) or "", _table(("field", "", ""), _fields(what))]
    else:
        shown = _signature(name, what) if callable(what) and not inspect.isclass(what) else ""
        parts += [part for part in (shown, inspect.getdoc(what) or "") if part]
    return "\n\n".join(parts)


def _methods(owner: type) -> Iterator[str]:
    for name, one in vars(owner).items():
        if name.startswith("_"):
            continue
        doc = inspect.getdoc(one) or ""
        if isinstance(one, property):
            yield f"### `{name}`\n\n{doc or 'A property.'}"
        elif inspect.isfunction(one):
            yield f"### `{name}`\n\n{_signature(name, one)}\n\n{doc}"


def _signature(name: str, function: Any) -> str:
    """As it is written, one parameter a line where they are many."""
    signature = inspect.signature(function)
    given = [one for one in signature.parameters.values() if one.name != "self"]
    told = [_parameter(one) for one in given]
    kinds = [one.kind for one in given]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        told.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(told)}) -> {signature.return_annotation}"
    if len(line) > MAX_LINE:
        lines = ",\n    ".join(told)
        line = f"{name}(\n    {lines},\n) -> {signature.return_annotation}"
    return f"```text\n{line}\n```"


def _parameter(one: inspect.Parameter) -> str:
    default = "" if one.default is inspect.Parameter.empty else f" = {one.default!r}"
    return f"{one.name}: {one.annotation}{default}"


def _fields(owner: Any) -> Iterator[tuple[str, str, str]]:
    """Name, type and the docstring below it, of each public field."""
    docs = field_docs(owner)
    for one in fields(owner):
        if not one.name.startswith("_"):
            yield f"`{one.name}`", f"`{one.type}`", docs.get(one.name, "")


def field_docs(owner: type) -> dict[str, str]:
    """The strings that stand below the fields of a class and of those it is made of."""
    docs: dict[str, str] = {}
    for part in reversed(owner.__mro__[:-1]):
        body = ast.parse(inspect.cleandoc(inspect.getsource(part))).body[0]
        assert isinstance(body, ast.ClassDef)
        last = ""
        for line in body.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                last = line.target.id
            elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and last:
                docs[last] = " ".join(str(line.value.value).split())
                last = ""
            else:
                last = ""
    return docs


def commands() -> str:
    """Every command, with its arguments and options."""
    parts = ["# Command line", "`kdn COMMAND --help` shows the same in a terminal."]
    for path, command in walk():
        name = " ".join(("kdn", *path))
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        usage = " ".join([name, "[OPTIONS]", *(_usage(one) for one in arguments)])
        parts += [f"## `{name}`", command.help or "", f"```text\n{usage}\n```"]
        rows = [
            (_flags(one), getattr(one, "help", None) or "", _default(one))
            for one in command.params
            if one.name != "help"
        ]
        if rows:
            parts.append(_table(("", "", "default"), rows))
    return "\n\n".join(parts) + "\n"


def walk() -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands of the tree. Those of groups are imported for it."""
    import typer

    from kdn.cli.main import app

    def below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if not hasattr(command, "list_commands"):
            yield path, command
            return
        context = command.context_class(command)
        for name in command.list_commands(context):
            yield from below(command.resolve_command(context, [name])[1], (*path, name))

    return below(typer.main.get_command(app), ())


def _usage(argument: Any) -> str:
    name = str(argument.name).upper()
    return name if argument.required else f"[{name}]"


def _flags(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{str(parameter.name).upper()}`"
    return ", ".join(f"`{one}`" for one in parameter.opts)


def _default(parameter: Any) -> str:
    default = parameter.default
    is_plain = isinstance(default, str | int | float | Path) and default is not False
    return f"`{default}`" if is_plain and str(default) else ""


def settings() -> str:
    """The tables of `kdn.toml`, with names, defaults and meanings."""
    from kdn import config

    parts = ["# Settings", inspect.getdoc(config) or ""]
    for heading, owner in (
        ("[node]", config.NodeSettings),
        ("[client]", config.ClientSettings),
        ("[tenants.NAME]", config.TenantSettings),
    ):
        docs = field_docs(owner)
        rows = [
            (f"`{one.name}`", _field_default(one), docs.get(one.name, ""))
            for one in fields(owner)
            if not (heading == "[tenants.NAME]" and one.name == "name")
        ]
        parts += [f"## `{heading}`", _table(("setting", "default", ""), rows)]
    return "\n\n".join(parts) + "\n"


def _field_default(one: Any) -> str:
    if one.name == "data":
        return "`~/.cache/kdn/node`"  # below KDN_CACHE, where that is set: not this machine's
    if one.default in (MISSING, "", None, ()):
        return ""
    if one.name.endswith("_bytes") and one.default:
        size, unit = next((each for each in _SIZES if one.default % each[0] == 0), (1, "bytes"))
        return f"{one.default // size:,} {unit}"
    return f"`{str(one.default).lower() if isinstance(one.default, bool) else one.default}`"


def http() -> str:
    """The operations of a node, from its OpenAPI document."""
    from kdn.node.openapi import document

    told = document()
    parts = [
        "# HTTP",
        "A node answers these requests. `GET /v1/openapi.json` is the same for machines, and "
        "[the protocol](../protocol.md) says what each of them means.",
    ]
    for path, operations in told["paths"].items():
        for method, operation in operations.items():
            if method == "parameters":
                continue
            parts += [f"## `{method.upper()} {path}`", operation.get("summary", "")]
            given = [*operations.get("parameters", []), *operation.get("parameters", [])]
            rows = [
                (f"`{one['name']}`", one["in"], "yes" if one.get("required") else "")
                for one in given
            ]
            if rows:
                parts.append(_table(("parameter", "in", "required"), rows))
            statuses = ", ".join(f"`{status}`" for status in operation.get("responses", {}))
            parts.append(f"Answers: {statuses}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(headings: tuple[str, ...], rows: Any) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
