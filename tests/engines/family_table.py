"""The table of docs/models.md: written by `python -m tests.engines.family_table`, read by tests."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers

from kdn.calibrate.progress import bar
from tests.engines.family_models import FAMILIES
from tests.engines.family_trials import Row, trial

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "models.md"
_BEGIN, _END = "<!-- families -->", "<!-- end of families -->"
_HEAD = "| family | exact | klt | remarks |\n|---|---|---|---|\n"

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "llama, dynamic NTK": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama, linear scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, yarn": (
        "llama",
        {"rope_parameters": {**_YARN, "original_max_position_embeddings": 256}},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.25] * 8,
                "long_factor": [2.0] * 8,
            },
            "original_max_position_embeddings": 1024,
        },
    ),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
}
"""Settings that decide what becomes of a family, beside those of FAMILIES."""


def trial_of(name: str) -> Row:
    """Of a family, or of a variant of one."""
    family, settings = VARIANTS.get(name, (name, {}))
    row = trial(family, **settings)
    return Row(name, row.exact, row.klt, row.remarks)


def written(rows: Iterable[Row]) -> str:
    """As markdown."""
    lines = (f"| {row.family} | {row.exact} | {row.klt} | {row.remarks} |\n" for row in rows)
    return _HEAD + "".join(lines)


def read() -> dict[str, Row]:
    """What the document says, by family or variant."""
    rows = [line.strip("| \n").split(" | ") for line in _table().splitlines()[2:]]
    found = [Row(*(cell.strip() for cell in (*row, *[""] * (4 - len(row))))) for row in rows]
    return {row.family: row for row in found}


def made_with() -> str:
    """The release of transformers that the document speaks of."""
    found = re.search(r"transformers (\d[\w.]*)", DOCUMENT.read_text())
    assert found is not None
    return found[1]


def _table() -> str:
    return DOCUMENT.read_text().partition(_BEGIN)[2].partition(_END)[0].strip()


def write() -> None:
    """Try everything, and put it into the document: nothing is written if a cache is wrong."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names, rows = sorted([*FAMILIES, *VARIANTS]), []
    with bar() as progress:
        for done, name in enumerate(names):
            progress("trying families", done, len(names))
            rows.append(trial_of(name))
        progress("trying families", len(names), len(names))
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(_BEGIN)
    head = re.sub(r"transformers \d[\w.]*", f"transformers {transformers.__version__}", head)
    tail = rest.partition(_END)[2]
    DOCUMENT.write_text(f"{head}{_BEGIN}\n\n{written(rows)}\n{_END}{tail}")


if __name__ == "__main__":
    sys.exit(write())
