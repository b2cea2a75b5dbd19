"""The examples of the README, of the quick start and of blending run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
QUICK_START = README.parent / "docs" / "quickstart-transformers.md"
BLENDING = README.parent / "docs" / "blending.md"
EXAMPLES = [
    pytest.param(code, id=f"{path.stem}-{number}")
    for path in (README, QUICK_START, BLENDING)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


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


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 5
