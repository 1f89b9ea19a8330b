"""What can be expected to go wrong, as a line for people and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

FAILURE = 1
USAGE = 2


class CommandFailed(Exception):
    """A command can't do what it was told. The message is for people, or for programs if it is ``bare``."""

    def __init__(self, message: str, code: int = FAILURE, *, bare: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.bare = bare


class WrongUsage(CommandFailed):
    """The command line or the settings are wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE)


def explain(error: BaseException) -> CommandFailed | None:
    """The fault that ``error`` is; None if nobody expected it, so that its traceback is worth showing.

    The modules that define the errors are not imported for this: who has not been imported has raised nothing.
    """
    if isinstance(error, CommandFailed):
        return error
    if is_a(error, "fencepost_server.config", "ConfigError"):
        return WrongUsage("wrong settings:\n" + "\n".join(f"  {fault}" for fault in getattr(error, "faults", [])))
    if is_a(error, "fencepost_server.domain.errors", "FencepostError"):
        return CommandFailed(f"{getattr(error, 'reason', '')}: {error}")
    if is_a(error, "fencepost_server.embedded", "EmbeddedFailed"):
        return CommandFailed(str(error))
    if is_a(error, "fencepost_server.supervisor", "ProcessFailed"):
        return CommandFailed(str(error), getattr(error, "code", FAILURE))
    if is_a(error, "fencepost_server.supervisor", "CannotStart"):
        return _all_of(getattr(error, "exceptions", ()))
    if is_a(error, "psycopg", "Error"):
        from fencepost_server.store.explain import explain as explain_driver_error

        return CommandFailed(explain_driver_error(error))
    if isinstance(error, UnicodeEncodeError):
        return WrongUsage(f"{error.object[:80]!r} is not Unicode text")
    if isinstance(error, OSError):
        return CommandFailed(str(error))
    return None


def _all_of(causes: Sequence[BaseException]) -> CommandFailed | None:
    """All faults in one; None if one of them was not expected."""
    faults = [explain(cause) for cause in causes]
    expected = [fault for fault in faults if fault is not None]
    if len(expected) < len(faults):
        return None
    if len(expected) == 1:
        return expected[0]
    return CommandFailed("can't start:\n" + "\n".join(f"  {fault}" for fault in expected))


def is_a(error: BaseException, module: str, name: str) -> bool:
    """Whether ``error`` is of a class that is not to be imported for this question; see `explain`."""
    loaded: Mapping[str, object] = vars(sys.modules[module]) if module in sys.modules else {}
    kind = loaded.get(name)
    return isinstance(kind, type) and isinstance(error, kind)
