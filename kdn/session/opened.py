"""A base for objects opened with `async with`: their parts are closed in reverse order, even if
opening one of them fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from typing import Self


class Opened(ABC):
    def __init__(self) -> None:
        self._parts = AsyncExitStack()

    @abstractmethod
    async def _open(self) -> None:
        """Enter each part into `_parts`."""

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._parts.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all parts, the last one opened first. Publishing is finished as far as that takes
        no longer than a few seconds."""
        await self._parts.aclose()
