"""Pages of the site whose links lead elsewhere than in the repository."""

from __future__ import annotations

import re

OUTSIDE = {
    "[LICENSE](LICENSE)": "LICENSE",
    "[examples](examples)": "`examples/` in the repository",
    "[deployment](deploy/README.md)": "`deploy/` in the repository",
}
"""Links of the README to what is not in the site."""


def front_page(readme: str) -> str:
    """The README, seen from docs/."""
    text = readme.replace("](docs/decisions)", "](decisions/0001-klt.md)")
    text = re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", text)
    for link, words in OUTSIDE.items():
        text = text.replace(link, words)
    return text


def page(text: str) -> str:
    """A page of docs/: there the README is the front page."""
    return text.replace("](../README.md", "](index.md")
