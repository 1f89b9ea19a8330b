"""The SDK's own log. What handlers and filters of the program raise goes to standard error and not into the SDK: a
collector of logs that is away must cost no heartbeat and no result of a step.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from typing import Any


class SdkLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that never raises."""

    def __init__(self, name: str, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logging.getLogger(name), extra or {})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave message and ``extra`` as they are."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, stacklevel: int = 1, **kwargs: Any) -> None:
        """As a Logger's. What is raised is printed, as `logging.Handler.handleError` does."""
        try:
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **kwargs)
        except Exception:  # noqa: BLE001 - of whatever kind, it is the program's own
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(OSError, ValueError):
                    traceback.print_exc()
