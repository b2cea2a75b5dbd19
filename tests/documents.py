"""The documents of the project, taken apart: blocks of code, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def name_of(path: Path) -> str:
    """As readers call it: `README.md`, `tutorials/rag.md`."""
    return str(path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT))


def examples(path: Path, *languages: str) -> list[str]:
    return [code for _, language, code in _BLOCK.findall(path.read_text()) if language in languages]


def prose(path: Path) -> str:
    """All but the blocks of code."""
    return _BLOCK.sub("", path.read_text())


def inline_code(path: Path) -> list[str]:
    """Each on one line, however it is wrapped."""
    return [" ".join(code.split()) for code in _INLINE.findall(prose(path))]


def links(path: Path) -> list[str]:
    """To files and headings of the project; those to the web are left out."""
    text = _INLINE.sub("", prose(path))
    found = [first or second for first, second in _LINK.findall(text)]
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def anchors(path: Path) -> tuple[set[str], set[str]]:
    """Of all headings: as GitHub makes them, and as MkDocs does."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(path), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one).replace("`", "") for one in headings]
    return set(_numbered(map(_on_github, plain))), set(_numbered(map(_on_the_site, plain), "_"))


def _on_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _on_the_site(heading: str) -> str:
    kept = re.sub(r"[^\w\s-]", "", heading.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


def _numbered(slugs: Iterator[str] | map[str], between: str = "-") -> Iterator[str]:
    """A heading that comes again has a number."""
    seen: dict[str, int] = {}
    for slug in slugs:
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        yield f"{slug}{between}{count}" if count else slug
