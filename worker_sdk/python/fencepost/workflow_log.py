"""The log of a workflow: silent while a replay repeats what was logged before. So what handlers raise must not reach
the function, or it would not do the same twice.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from fencepost.sdk_log import SdkLog


class Logging(Protocol):
    """The run that logs."""

    @property
    def run_id(self) -> str:
        """The run."""

    @property
    def workflow_id(self) -> str:
        """Its workflow."""

    @property
    def replaying(self) -> bool:
        """Whether its function repeats what is recorded."""


class WorkflowLogger(SdkLog):
    """Puts run and workflow in each record (``extra``), and the run before each message."""

    def __init__(self, context: Logging) -> None:
        super().__init__("fencepost.workflow", {"run_id": context.run_id, "workflow_id": context.workflow_id})
        self._context = context

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's own name
        """Not while a replay repeats what was logged before."""
        return not self._context.replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add what the adapter knows to the record, under what the call itself gave."""
        known = dict(self.extra or {})
        kwargs["extra"] = {**known, **(kwargs.get("extra") or {})}
        return f"[{known['run_id']}] {msg}", kwargs
