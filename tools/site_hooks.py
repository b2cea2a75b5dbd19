"""What MkDocs does not do by itself: the front page, and pages that are made from the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tools import pages, reference

ROOT = Path(__file__).parent.parent
MAY_BE_MISSING = ("from-lmcache.md", "metrics.md")
"""Listed as soon as they are there."""


def on_config(config: Any) -> Any:
    config.nav = _present(config.nav)
    return config


def _present(entries: list[Any]) -> list[Any]:
    kept = []
    for entry in entries:
        [(title, below)] = entry.items() if isinstance(entry, dict) else [("", entry)]
        if isinstance(below, list):
            kept.append({title: _present(below)})
        elif below not in MAY_BE_MISSING or (ROOT / "docs" / below).is_file():
            kept.append(entry)
    return kept


def on_files(files: Files, config: Any) -> Files:
    made = [("index.md", pages.front_page((ROOT / "README.md").read_text())), *reference.pages()]
    for path, text in made:
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return pages.page(markdown)
