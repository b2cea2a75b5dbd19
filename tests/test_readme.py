"""The programs of the README, of the quick start, of blending and of the tutorials run as they
stand; the figures that the README quotes are those of the pages it quotes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdn.bench.node_servers import start_kdn
from tests.documents import DOCS, ROOT, examples

README = ROOT / "README.md"
PROGRAMS = {
    "README.md": 1, "quickstart-transformers.md": 3, "blending.md": 1,
    "tutorials/rag.md": 1, "tutorials/moving-chat.md": 2, "tutorials/agent.md": 2,
}  # fmt: skip
"""Pages, and how many examples they have."""
NODE = "http://127.0.0.1:8470"


def path_of(name: str) -> Path:
    return README if name == "README.md" else DOCS / name


EXAMPLES = [
    pytest.param(code, id=f"{Path(name).stem}-{number}")
    for name in PROGRAMS
    if not name.startswith("tutorials/")
    for number, code in enumerate(examples(path_of(name), "python"))
]
TUTORIALS = [name for name in PROGRAMS if name.startswith("tutorials/")]


@pytest.mark.model
@pytest.mark.parametrize("code", EXAMPLES)
def test_the_examples_run(
    code: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.model
@pytest.mark.parametrize("name", TUTORIALS)
def test_the_examples_of_a_tutorial_follow_each_other(
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    codes, names = examples(path_of(name), "python"), {}
    with start_kdn(tmp_path / "node") as node:
        for code in codes:
            exec(compile(code.replace(NODE, node.url), name, "exec"), names)
            told = capsys.readouterr().out
            assert told.strip()
    assert _keeps_its_promise(name, told)


def _keeps_its_promise(name: str, told: str) -> bool:
    """What the page says that the last example shows."""
    numbers = [int(one) for one in re.findall(r"\d+", told)]
    if name == "tutorials/agent.md":  # "sub-1: N chunks known, M tokens read", twice
        return numbers[1] >= 2 and numbers[4] >= 2
    if name == "tutorials/moving-chat.md":  # "N tokens loaded, M computed"
        return numbers[0] >= 256 and numbers[0] > numbers[1]
    return "tokens loaded" in told


def test_there_are_examples() -> None:
    assert len(EXAMPLES) + len(TUTORIALS) == 8


def test_the_readme_quotes_figures_as_they_were_measured() -> None:
    """Every figure of its table stands in the table of docs/vllm.md."""
    [table] = re.findall(r"\n\| \| no cache .*?\n\n", README.read_text(), re.DOTALL)
    figures = set(re.findall(r"\d+\.\d+", table))
    assert len(figures) >= 15
    measured = (DOCS / "vllm.md").read_text().split("## Measured beside others")[1]
    assert sorted(figures - set(re.findall(r"\d+\.\d+", measured))) == []


def test_the_generated_figures_have_a_place() -> None:
    text = (DOCS / "measured.md").read_text()
    assert text.count("<!-- figures: begin") == text.count("<!-- figures: end -->") == 1
