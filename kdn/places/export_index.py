"""How the chunks of an export are cut into pages of its index (`kdn/store/static_layout.py`).

A page holds all that follows its first chunk, if that is little. Otherwise it holds the longest
chain from there, with what little branches off, up to where more branches off than it has room for:
there every next chunk begins a page of its own. So the page of a long context is long, which its
readers need anyway, and that of a beginning which many contexts share holds just that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kdn.store.base import Entry

BRANCHING_CHUNKS = 48
"""In a page, beside its longest chain; or all that follows its first chunk. Readers count on less
than 64."""
CHAIN_CHUNKS = 640
"""Longest chain in a page: 160,000 tokens. With heads of 4 KiB a page stays below 4 MiB."""


@dataclass
class PagePlan:
    members: list[bytes]
    """Each after the one it follows; the first names the page."""
    onward: dict[bytes, list[bytes]] = field(default_factory=dict)
    """Where the next chunks have pages of their own."""


def plan_pages(entries: Mapping[bytes, Entry]) -> list[PagePlan]:
    """All pages; those that a page leads to come before it."""
    children, roots = _trees(entries)
    order = list(_in_order(roots, children))
    counts = dict.fromkeys(order, 1)
    for key in reversed(order):
        counts[key] += sum(counts[child] for child in children.get(key, ()))
    pages: list[PagePlan] = []
    todo = list(roots)
    while todo:
        page = _plan_page(todo.pop(), children, counts)
        pages.append(page)
        todo += [key for some in page.onward.values() for key in some]
    pages.reverse()
    return pages


def _plan_page(
    first: bytes, children: Mapping[bytes, Sequence[bytes]], counts: Mapping[bytes, int]
) -> PagePlan:
    if counts[first] <= BRANCHING_CHUNKS:
        return PagePlan(list(_in_order([first], children)))
    page, key, room = PagePlan([first]), first, BRANCHING_CHUNKS
    length = 1
    while after := sorted(children.get(key, ()), key=lambda one: -counts[one]):
        main, sides = after[0], after[1:]
        needed = sum(counts[one] for one in sides)
        if needed > room:
            page.onward[key] = sorted(after)
            break
        room -= needed
        page.members += _in_order(sides, children)
        if length == CHAIN_CHUNKS:
            page.onward[key] = [main]
            break
        page.members.append(main)
        key, length = main, length + 1
    return page


def _trees(entries: Mapping[bytes, Entry]) -> tuple[dict[bytes, list[bytes]], list[bytes]]:
    """The chunks after each, and those after none that is here. Whatever is only reached in a
    circle, which no writer of ours makes, is taken out of it."""
    children: dict[bytes, list[bytes]] = {}
    roots = []
    for key in sorted(entries):
        parent = entries[key].hints.parent
        if parent is None or parent == key or parent not in entries:
            roots.append(key)
        else:
            children.setdefault(parent, []).append(key)
    reached = set(_in_order(roots, children))
    for key in sorted(entries):
        if key not in reached:
            parent = entries[key].hints.parent
            assert parent is not None
            children[parent].remove(key)
            roots.append(key)
            reached.update(_in_order([key], children))
    return children, roots


def _in_order(first: Sequence[bytes], children: Mapping[bytes, Sequence[bytes]]) -> Iterator[bytes]:
    """These and all that follow, each after the one it follows. No recursion: chains are long."""
    todo = list(reversed(first))
    while todo:
        key = todo.pop()
        yield key
        todo += reversed(children.get(key, ()))
