"""Runs to start as lines of JSON: `fencepost runs start WORKFLOW --many FILE`.

Imported by commands only: the SDK takes a while to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from fencepost import Client, FencepostError, InvalidJson, InvalidRequest, RunHandle, StartRun, Unavailable, Value
from fencepost_server.domain.durations import parse_duration

BATCH = 1000


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line may say. The input's text is sent to the letter, so that no number is changed on the way."""

    input: msgspec.Raw = msgspec.Raw(b"null")
    request_key: str = ""
    user_id: str = ""
    priority: int = 0
    definition_hash: str = ""
    dedupe_key: str = ""
    on_active_duplicate: Literal["", "conflict", "bind"] = ""
    attributes: dict[str, str] = {}
    start_delay: str = ""
    run_timeout: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for durations that are none."""
        for name in ("start_delay", "run_timeout"):
            try:
                _seconds(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None

    def start(self, workflow_id: str, text: str | None = None) -> StartRun:
        """The run to start, with ``text`` as its input if given."""
        return StartRun(
            workflow_id,
            Value(json=bytes(self.input).decode() if text is None else text),
            self.request_key,
            self.user_id,
            self.priority,
            self.definition_hash,
            self.dedupe_key,
            self.on_active_duplicate or "conflict",
            attributes=self.attributes,
            start_delay=_seconds(self.start_delay) or 0.0,
            run_timeout=_seconds(self.run_timeout),
        )

    def over(self, defaults: Line) -> Line:
        """This line, and ``defaults`` where it says nothing. What is to become of duplicates is taken over only with a
        dedupe key: without one there are none, and the server refuses it.
        """
        return Line(
            self.input,
            self.request_key,
            self.user_id or defaults.user_id,
            self.priority or defaults.priority,
            self.definition_hash or defaults.definition_hash,
            self.dedupe_key,
            self.on_active_duplicate or (defaults.on_active_duplicate if self.dedupe_key else ""),
            {**defaults.attributes, **self.attributes},
            self.start_delay or defaults.start_delay,
            self.run_timeout or defaults.run_timeout,
        )


def _seconds(text: str) -> float | None:
    return parse_duration(text) / 1000 if text else None


_decoder = msgspec.json.Decoder(Line)

Outcome = tuple[int, RunHandle | FencepostError]
"""The number of a line, from 1, and what became of it."""


def start_lines(client: Client, workflow_id: str, lines: Iterable[bytes], defaults: Line) -> Iterator[list[Outcome]]:
    """Start a run for each line that is not blank, and give the outcomes batch by batch, in the order of the lines.

    A line that can't be understood is an outcome like a refusal by the server. Raises Unavailable if nothing of a batch
    could be started because no server answered.
    """
    batch: list[tuple[int, StartRun | InvalidRequest]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            batch.append((number, _parsed(workflow_id, line, defaults)))
        if len(batch) == BATCH:
            yield _start(client, batch)
            batch = []
    if batch:
        yield _start(client, batch)


def _parsed(workflow_id: str, line: bytes, defaults: Line) -> StartRun | InvalidRequest:
    try:
        return _decoder.decode(line).over(defaults).start(workflow_id)
    except msgspec.ValidationError as error:  # it is JSON, with a key or a value that a line can't have
        return InvalidRequest(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return InvalidJson(str(error))


def _start(client: Client, batch: list[tuple[int, StartRun | InvalidRequest]]) -> list[Outcome]:
    outcomes = iter(client.start_runs(start for _, start in batch if isinstance(start, StartRun)))
    results: list[Outcome] = [
        (number, start if isinstance(start, InvalidRequest) else next(outcomes)) for number, start in batch
    ]
    refusals = [outcome for _, outcome in results if not isinstance(outcome, InvalidRequest)]
    if refusals and all(isinstance(outcome, Unavailable) for outcome in refusals):
        raise refusals[0] if isinstance(refusals[0], Unavailable) else AssertionError
    return results
