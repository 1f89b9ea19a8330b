"""One of the two clients, asked the same way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fencepost import AsyncClient, Client


class Either:
    """A client: the sync one is asked in a thread, because the server may be in this loop."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    async def __call__(self, method: str, *arguments: Any, on: Any = None, **keywords: Any) -> Any:
        """Call a method of the client, or of what it has returned (``on``)."""
        function = getattr(on or self.client, method)
        if isinstance(self.client, Client):
            return await asyncio.to_thread(function, *arguments, **keywords)
        return await function(*arguments, **keywords)

    async def all(self, method: str, *arguments: Any, on: Any = None, **keywords: Any) -> list[Any]:
        """All that an iterator has."""
        found = getattr(on or self.client, method)(*arguments, **keywords)
        if isinstance(found, AsyncIterator):
            return [item async for item in found]
        assert isinstance(found, Iterator)
        return await asyncio.to_thread(list, found)

    async def close(self) -> None:
        """Close it."""
        if isinstance(self.client, Client):
            self.client.close()
        else:
            await self.client.close()
