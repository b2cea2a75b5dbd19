"""The site of the documentation, without MkDocs: its pages, its reference, its pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import yaml

import kdn
from kdn.config import ClientSettings, NodeSettings, TenantSettings
from tests.documents import DOCS, ROOT
from tools import pages, pictures, reference

MADE = {"index.md", *(path for path, _ in reference.pages())}
MAY_BE_MISSING = {"from-lmcache.md", "metrics.md"}


def listed(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        below = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(below, list):
            yield from listed(below)
        else:
            yield below


def test_every_page_is_listed_and_every_listed_page_is_there() -> None:
    pages = list(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(pages) == len(set(pages))
    here = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert here - set(pages) == set()
    assert set(pages) - here - MADE <= MAY_BE_MISSING


def test_links_of_all_pages_lead_to_pages_and_pictures() -> None:
    """As `make docs` checks them. Links to headings are checked with the documents."""
    every = {"index.md": pages.front_page((ROOT / "README.md").read_text())}
    every |= {str(one.relative_to(DOCS)): pages.page(one.read_text()) for one in DOCS.rglob("*.md")}
    wrong = []
    for name, text in every.items():
        for link in re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            target = (DOCS / name).parent.joinpath(link).resolve()
            is_made = target.is_relative_to(DOCS) and str(target.relative_to(DOCS)) in MADE
            is_here = target.is_file() and target.is_relative_to(DOCS)
            if "://" not in link and not is_made and not is_here:
                wrong.append(f"{name}: {link}")
    assert wrong == []


def test_the_site_fetches_nothing() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & set(settings)


def test_the_reference_of_python_has_every_public_name() -> None:
    text = reference.python()
    assert re.findall(r"^## `(\w+)`", text, re.MULTILINE) == sorted(kdn.__all__)
    assert "### `ask_all`" in text
    assert "| `ttft_s` | `float` | " in text
    assert "'" not in text.split("### `load`")[1].split("```")[1]  # types, not strings of them


def test_the_reference_of_commands_has_every_command() -> None:
    text = reference.commands()
    for command in ("kdn node", "kdn bench codec", "kdn ls", "kdn demo"):
        assert f"\n## `{command}`\n" in text
    assert "| `--workers` | Processes that answer, each on a core of its own. |" in text
    assert "| `--codec` | klt, or exact without any loss. | `klt` |" in text
    assert "function" not in re.sub(r"[^|]*\|", "", text)


def test_the_reference_of_settings_explains_every_setting() -> None:
    text = reference.settings()
    for owner in (NodeSettings, ClientSettings, TenantSettings):
        for one in fields(owner):
            [*rows] = re.findall(rf"^\| `{one.name}` \|(.*)\|(.*)\|$", text, re.MULTILINE)
            assert all(meaning.strip() for _, meaning in rows), one.name
            assert rows or one.name == "name"
    assert "| `memory_bytes` | 1 GiB |" in text


def test_the_reference_of_http_has_every_route() -> None:
    text = reference.http()
    for route in ("GET /v1/{collection}/{key}", "POST /v1/lookup", "PUT /v1/names/{name}"):
        assert f"\n## `{route}`\n" in text


def test_the_pictures_are_those_that_the_project_draws() -> None:
    """After a new demo.json or profile: `make pictures`."""
    drawn = dict(pictures.pictures())
    assert len(drawn) == 6
    for name, content in drawn.items():
        assert (pictures.FOLDER / name).read_text() == content, name


def test_a_timeline_shows_what_was_measured() -> None:
    stats = {"fetched_bytes": 2_000_000}
    answers = [
        {"question": "Why?", "way": way, "ttft_s": ttft_s, "delivered_s": 0.5 * ttft_s,
         "text_s": [ttft_s, ttft_s + 0.1], "stats": stats}
        for way, ttft_s in (("with", 1.25), ("without", 12.5))
    ]  # fmt: skip
    learn = {"num_tokens": 4000, "fp16_bytes": 90_000_000}
    measured = {"answers": answers, "learn": learn, "mbit": 100.0, "hardware": {"cpu": "A <CPU>"}}
    for theme in pictures.THEMES:
        text = str(pictures.timeline(measured, theme))
        for part in ("4,000 tokens", "100 Mbit/s", "Why?", "with kdn: 1.2 s", "reading it: 12.5 s",
                     "90 MB", "2.0 MB", "A &lt;CPU&gt;"):  # fmt: skip
            assert part in text
