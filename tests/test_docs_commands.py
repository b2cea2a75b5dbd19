"""Every command that the documents show exists, with these options: `kdn ...` and `make ...`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, ROOT, examples, inline_code, name_of
from tools import reference

SHELL = ("sh", "bash", "")
BETWEEN = {"&&", "||", "|", ";", "&"}
PLACEHOLDERS = {"COMMAND"}


@cache
def tree() -> dict[tuple[str, ...], set[str]]:
    """Options of every command, by its path."""
    return {
        path: {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        for path, command in reference.walk()
    }


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def lines(block: str) -> Iterator[str]:
    """Of a shell: a line goes on while a quote is open, or after a backslash."""
    held = ""
    for line in block.splitlines():
        held += line.removesuffix("\\") + (" " if line.endswith("\\") else "\n")
        if line.endswith("\\") or held.count("'") % 2:
            continue
        yield held.strip()
        held = ""


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, each as its words."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word not in BETWEEN:
            words.append(word)
        elif words:
            yield words
            words = []


def fault(words: list[str]) -> str:
    """What is wrong with a command; empty if nothing is."""
    if words[0] == "make":
        unknown = [word for word in words[1:] if word not in targets() and "=" not in word]
        return f"no target {unknown}" if unknown else ""
    if words[0] != "kdn" or len(words) == 1 or words[1] in PLACEHOLDERS | {"--help"}:
        return ""
    path = next((p for p in tree() if tuple(words[1 : 1 + len(p)]) == p), None)
    if path is None:
        is_group = any(p[: len(words) - 1] == tuple(words[1:]) for p in tree())
        return "" if is_group else f"no command {words[1:3]}"
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    unknown = sorted(given - tree()[path] - {"--help"})
    return f"{' '.join(path)} has no {unknown}" if unknown else ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_exist(path: Path) -> None:
    shown = [one for block in examples(path, *SHELL) for one in lines(block)]
    shown = [one for one in shown if re.search(r"\b(kdn|make) ", one)]
    shown += [one for one in inline_code(path) if re.match(r"(kdn|make) [a-z-]", one)]
    faults = [(one, fault(words)) for one in shown for words in commands(one)]
    assert [one for one in faults if one[1]] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kdn node --workers 8 --host 0.0.0.0 &", []),
        ("kdn ls --chunks | head && kdn bench codec --text a b --json c", []),
        ("kdn bench", []),
        ("make demo  # nice", []),
        ("kdn node --worker 8", ["node has no ['--worker']"]),
        ("kdn nod", ["no command ['nod']"]),
        ("kdn ls && kdn bench codex", ["no command ['bench', 'codex']"]),
        ("make dinner", ["no target ['dinner']"]),
    ],
)
def test_wrong_commands_are_found(line: str, expected: list[str]) -> None:
    assert [told for words in commands(line) if (told := fault(words))] == expected


def test_a_line_goes_on_within_quotes() -> None:
    block = "vllm serve M --config '{\n  \"a\": 1}'\nkdn ls \\\n  --chunks\n"
    assert [shlex.split(one)[:2] for one in lines(block)] == [["vllm", "serve"], ["kdn", "ls"]]
