"""Whether this thread is in a garbage collection just now.

What is dropped because its last reference goes is dropped at the same place in each replay; what a collection finds in
a cycle is dropped whenever that collection happens. Only the first may have effects in a workflow.
"""

from __future__ import annotations

import gc
import threading

_collecting: set[int] = set()


def _notice(phase: str, _: dict[str, int]) -> None:
    if phase == "start":
        _collecting.add(threading.get_ident())
    else:
        _collecting.discard(threading.get_ident())


def watch_collections() -> None:
    """Notice collections from now on. Once is enough, more do no harm."""
    if _notice not in gc.callbacks:
        gc.callbacks.append(_notice)


def is_collecting() -> bool:
    """Whether the caller was called by a garbage collection in this thread."""
    return threading.get_ident() in _collecting
