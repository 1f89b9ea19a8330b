"""The options and names of what a workflow's function asks for, looked at when it asks.

What the server would refuse is refused at the call, where the traceback has its line: with TypeError or ValueError that
names the op and each option at fault. Options are looked at once for each combination of their values, because a
function may ask for the same step a million times.

Caller: `workflow_context`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from fencepost.names import NAME_RULE, is_name
from fencepost.policies import (
    ATTEMPT,
    LEASE,
    Fault,
    Retry,
    Seconds,
    UndoBy,
    UndoPolicy,
    duration_text,
    handler_faults,
    length_faults,
    name_faults,
    raise_all,
    retry_faults,
    seconds_in,
)
from fencepost.steps import MAX_NAME

_KNOWN = 2048
_LABELS, _LABEL_NAME, _LABEL = 32, 100, 200
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_PARENT_ENDS = ("cancel", "terminate", "abandon")


def name_of(what: str, name: str) -> str:
    """The name of a handler, a workflow or a signal. Raises TypeError and ValueError for what can't be one."""
    _check_text(what, name)
    if not is_name(name):
        raise ValueError(f"{name[:40]!r} is no name of a {what}: {NAME_RULE}")
    return name


def label_of(what: str, name: str) -> str:
    """The name of what only this workflow knows: a local step, a patch, a query. Raises as `name_of`."""
    _check_text(what, name)
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(f"a {what} has 1 to {MAX_NAME} printable characters, which {name[:40]!r} has not")
    return name


def labels_of(attributes: Mapping[str, str | None]) -> dict[str, str]:
    """Labels for a run as they are sent. Raises TypeError and ValueError, for all that is wrong at once."""
    told = {key: value or "" for key, value in attributes.items()}
    if not all(isinstance(text, str) for pair in told.items() for text in pair):
        raise TypeError("names and values of attributes are text")
    faults: list[Fault] = []
    if len(told) > _LABELS:
        faults.append(ValueError(f"there are {len(told)}, and a run has at most {_LABELS}"))
    for key, value in told.items():
        if not is_name(key) or len(key) > _LABEL_NAME:
            faults.append(ValueError(f"{key[:40]!r} is not a name: {NAME_RULE}, and these have at most {_LABEL_NAME}"))
        if len(value) > _LABEL or _NO_TEXT.search(value):
            faults.append(
                ValueError(f"{key[:40]}: a value has at most {_LABEL} characters, and no NUL or lone surrogate")
            )
    raise_all("attributes", faults)
    return told


def _check_text(what: str, name: object) -> None:
    if not isinstance(name, str):
        hint = ": ctx.run takes functions" if what == "handler" and callable(name) else ""
        raise TypeError(f"a {what} has a name, which {type(name).__name__} is not{hint}")


def step_options(
    name: str,
    queue: str | None,
    timeout: Seconds | None,
    lease: Seconds | None,
    queue_timeout: Seconds | None,
    total_timeout: Seconds | None,
    retry: Retry | None,
    undo: UndoBy | None,
) -> str:
    """The options of a remote step as JSON text, empty if there are none. Raises TypeError and ValueError."""
    try:
        return _step_options(name, queue, timeout, lease, queue_timeout, total_timeout, retry, undo)
    except TypeError:
        # One of them is wrong, or only not to be looked up; then it is looked at each time.
        return _step_options.__wrapped__(name, queue, timeout, lease, queue_timeout, total_timeout, retry, undo)


@lru_cache(maxsize=_KNOWN, typed=True)
def _step_options(
    name: str,
    queue: str | None,
    timeout: Seconds | None,
    lease: Seconds | None,
    queue_timeout: Seconds | None,
    total_timeout: Seconds | None,
    retry: Retry | None,
    undo: UndoBy | None,
) -> str:
    faults = [
        *name_faults("queue", queue),
        *length_faults("timeout", timeout, ATTEMPT),
        *length_faults("lease", lease, LEASE),
        *length_faults("queue_timeout", queue_timeout, ATTEMPT),
        *length_faults("total_timeout", total_timeout, ATTEMPT),
        *retry_faults(retry),
        *_undo_faults(undo),
    ]
    raise_all(f"step {name}", faults)
    told: dict[str, Any] = {} if queue is None else {"queue": queue}
    lengths = {"timeout": timeout, "lease": lease, "queue_timeout": queue_timeout, "total_timeout": total_timeout}
    told |= {option: duration_text(seconds_in(length)) for option, length in lengths.items() if length is not None}
    if retry is not None:
        told["retry"] = retry.options()
    return _text(told, undo)


def child_options(name: str, on_parent_end: object, undo: UndoBy | None) -> str:
    """The same of a child run."""
    if on_parent_end is None and undo is None:
        return ""
    faults = list(_undo_faults(undo))
    if not isinstance(on_parent_end, str | None):
        faults.append(TypeError(f"on_parent_end: it is text, which {type(on_parent_end).__name__} is not"))
    elif on_parent_end is not None and on_parent_end not in _PARENT_ENDS:
        faults.append(ValueError(f"on_parent_end: {on_parent_end[:40]!r} is none of {', '.join(_PARENT_ENDS)}"))
    if isinstance(undo, UndoPolicy) and undo.unfinished:
        faults.append(ValueError("undo: unfinished is for steps: a child that does not complete undoes its own"))
    raise_all(f"child {name}", faults)
    return _text({} if on_parent_end is None else {"on_parent_end": on_parent_end}, undo)


def local_options(
    name: str, timeout: Seconds | None, retry: Retry | None, undo: UndoBy | None
) -> tuple[float | None, str]:
    """The timeout of a local step in seconds, and its options as JSON text. Raises TypeError and ValueError."""
    if timeout is None and retry is None and undo is None:
        return None, ""
    seconds: float | None = None
    faults = [*retry_faults(retry), *_undo_faults(undo)]
    if timeout is not None:
        try:
            seconds = seconds_in(timeout, "timeout")
        except (TypeError, ValueError) as error:
            faults.append(error)
    raise_all(f"local step {name}", faults)
    return seconds, _text({}, undo)


def _undo_faults(undo: object) -> Iterator[Fault]:
    if undo is not None and not isinstance(undo, UndoPolicy):
        yield from handler_faults("undo", undo)


def _text(told: dict[str, Any], undo: UndoBy | None) -> str:
    if undo is not None:
        told["undo"] = (undo if isinstance(undo, UndoPolicy) else UndoPolicy(undo)).options()
    return json.dumps(told, separators=(",", ":")) if told else ""
