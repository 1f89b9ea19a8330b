"""Handles of runs: what the clients return when they start one, and all that can be asked of it by its id."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from fencepost.async_client import AsyncClient
    from fencepost.client import Client
    from fencepost.events import Event
    from fencepost.models import Run, RunState, Signalled

T = TypeVar("T")


class RunHandle:
    """One run, started or found.

    ``created`` tells whether this start made it, None if nothing was started. ``input_differs`` tells that the
    start was bound to a run with another input (``on_active_duplicate="bind"``).
    """

    def __init__(
        self,
        client: Client,
        run_id: str,
        *,
        created: bool | None = None,
        definition_hash: str = "",
        input_differs: bool = False,
    ) -> None:
        self._client = client
        self.run_id = run_id
        self.created = created
        self.definition_hash = definition_hash
        self.input_differs = input_differs

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id}>"

    @overload
    def result(self, timeout: float | None = None) -> Any: ...
    @overload
    def result(self, timeout: float | None = None, *, type: type[T]) -> T: ...
    def result(self, timeout: float | None = None, *, type: Any = Any) -> Any:
        """Wait for the output, as plain JSON or as ``type``.

        Raises RunFailed, RunCancelled or RunTerminated if the run ended as that, TimeoutError if it has not ended
        within ``timeout`` seconds (None: wait for ever), NotDecodable if the output is no ``type``.
        """
        return self._client._run(self._client._requests.result(self.run_id, timeout, type))

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until it has ended, well or not. Raises TimeoutError."""
        return self._client.wait_run(self.run_id, timeout)

    def get(self) -> Run:
        """Read it as it is now."""
        return self._client.get_run(self.run_id)

    def events(self, after_seq: int = 0) -> Iterator[Event]:
        """Follow its events, those that exist and those to come, until its last one; goes on by itself after
        a break.
        """
        return self._client.watch_run(self.run_id, after_seq)

    def history(self) -> Iterator[Event]:
        """Read the events that exist."""
        return self._client.history(self.run_id)

    def signal(self, signal_name: str, payload: object = None, *, request_id: str = "") -> Signalled:
        """Give it a signal, as `Client.signal_run`."""
        return self._client.signal_run(self.run_id, signal_name, payload, request_id=request_id)

    def query(self, name: str, input: object = None, *, timeout: float = 10.0, type: Any = Any) -> Any:
        """Ask its function something, as `Client.query_run`."""
        return self._client.query_run(self.run_id, name, input, timeout=timeout, type=type)

    def cancel(self, reason: str = "", *, grace: float | None = None) -> RunState:
        """Ask it to end, as `Client.cancel_run`."""
        return self._client.cancel_run(self.run_id, reason, grace=grace)

    def terminate(self, reason: str = "") -> RunState:
        """End it at once, as `Client.terminate_run`."""
        return self._client.terminate_run(self.run_id, reason)

    def pause(self, reason: str = "") -> RunState:
        """Stop leasing its steps, as `Client.pause_run`."""
        return self._client.pause_run(self.run_id, reason)

    def resume(self, reason: str = "") -> RunState:
        """Let it go on after a pause, as `Client.resume_run`."""
        return self._client.resume_run(self.run_id, reason)

    def retry(self, reason: str = "", *, skip_undo: bool = False) -> RunState:
        """Let it go on after a failure, as `Client.retry_run`."""
        return self._client.retry_run(self.run_id, reason, skip_undo=skip_undo)


class AsyncRunHandle:
    """One run, started or found.

    ``created`` tells whether this start made it, None if nothing was started. ``input_differs`` tells that the
    start was bound to a run with another input (``on_active_duplicate="bind"``).
    """

    def __init__(
        self,
        client: AsyncClient,
        run_id: str,
        *,
        created: bool | None = None,
        definition_hash: str = "",
        input_differs: bool = False,
    ) -> None:
        self._client = client
        self.run_id = run_id
        self.created = created
        self.definition_hash = definition_hash
        self.input_differs = input_differs

    def __repr__(self) -> str:
        return f"<AsyncRunHandle {self.run_id}>"

    @overload
    async def result(self, timeout: float | None = None) -> Any: ...
    @overload
    async def result(self, timeout: float | None = None, *, type: type[T]) -> T: ...
    async def result(self, timeout: float | None = None, *, type: Any = Any) -> Any:
        """Wait for the output, as plain JSON or as ``type``.

        Raises RunFailed, RunCancelled or RunTerminated if the run ended as that, TimeoutError if it has not ended
        within ``timeout`` seconds (None: wait for ever), NotDecodable if the output is no ``type``.
        """
        return await self._client._run(self._client._requests.result(self.run_id, timeout, type))

    async def wait(self, timeout: float | None = None) -> Run:
        """Wait until it has ended, well or not. Raises TimeoutError."""
        return await self._client.wait_run(self.run_id, timeout)

    async def get(self) -> Run:
        """Read it as it is now."""
        return await self._client.get_run(self.run_id)

    def events(self, after_seq: int = 0) -> AsyncIterator[Event]:
        """Follow its events, those that exist and those to come, until its last one; goes on by itself after
        a break.
        """
        return self._client.watch_run(self.run_id, after_seq)

    def history(self) -> AsyncIterator[Event]:
        """Read the events that exist."""
        return self._client.history(self.run_id)

    async def signal(self, signal_name: str, payload: object = None, *, request_id: str = "") -> Signalled:
        """Give it a signal, as `AsyncClient.signal_run`."""
        return await self._client.signal_run(self.run_id, signal_name, payload, request_id=request_id)

    async def query(self, name: str, input: object = None, *, timeout: float = 10.0, type: Any = Any) -> Any:
        """Ask its function something, as `AsyncClient.query_run`."""
        return await self._client.query_run(self.run_id, name, input, timeout=timeout, type=type)

    async def cancel(self, reason: str = "", *, grace: float | None = None) -> RunState:
        """Ask it to end, as `AsyncClient.cancel_run`."""
        return await self._client.cancel_run(self.run_id, reason, grace=grace)

    async def terminate(self, reason: str = "") -> RunState:
        """End it at once, as `AsyncClient.terminate_run`."""
        return await self._client.terminate_run(self.run_id, reason)

    async def pause(self, reason: str = "") -> RunState:
        """Stop leasing its steps, as `AsyncClient.pause_run`."""
        return await self._client.pause_run(self.run_id, reason)

    async def resume(self, reason: str = "") -> RunState:
        """Let it go on after a pause, as `AsyncClient.resume_run`."""
        return await self._client.resume_run(self.run_id, reason)

    async def retry(self, reason: str = "", *, skip_undo: bool = False) -> RunState:
        """Let it go on after a failure, as `AsyncClient.retry_run`."""
        return await self._client.retry_run(self.run_id, reason, skip_undo=skip_undo)
