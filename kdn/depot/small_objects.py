"""Small objects of a bucket, for names: as few ways to use it as are needed.

`create` is what all rests on: of many who create one path, exactly one succeeds. A server that
ignores the condition would let all of them believe that they did, so names are refused there.
"""

from __future__ import annotations

from kdn.errors import LimitError, TruncatedError, UnsupportedError
from kdn.store.object_bucket import Bucket


class SmallObjects:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """None if there is none, LimitError if it is larger."""
        try:
            found = await self._bucket.get(path, 0, max_bytes)
        except TruncatedError:  # it is empty
            return b""
        if found is None:
            return None
        if found.size_bytes > max_bytes:
            raise LimitError(f"{path}: expected at most {max_bytes} bytes")
        return bytes(found.data)

    async def put(self, path: str, data: bytes) -> None:
        """In place of whatever is there."""
        await self._bucket.overwrite(path, data)

    async def create(self, path: str, data: bytes) -> bool:
        """False if there is one: perhaps this one, by an attempt whose answer was lost."""
        await self.check()
        return await self._bucket.put(path, data) is not None

    async def delete(self, path: str) -> None:
        """Nothing if there is none."""
        await self._bucket.delete(path)

    async def check(self) -> None:
        """UnsupportedError if this server does not keep to conditions. It is asked once."""
        if not (await self._bucket.abilities()).create:
            raise UnsupportedError(
                f"{self._bucket.name} does not keep to conditional writes (If-None-Match): names "
                "there could get lost. It can hold chunks, but no names"
            )

    async def close(self) -> None:
        await self._bucket.close()
