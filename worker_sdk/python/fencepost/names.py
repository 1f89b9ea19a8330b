"""What names are made of: of handlers, queues, workflows and signals, by the rule of the manifests that name them.

Callers: `steps`, `workflow`, `policies`, `op_options`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

NAME_RULE = "1 to 200 letters, digits and . _ - / of ASCII, beginning with a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


@functools.lru_cache(maxsize=4096)
def is_name(text: str) -> bool:
    """Whether it is as NAME_RULE says."""
    return _NAME.fullmatch(text) is not None


def check_name(what: str, name: object) -> None:
    """Raise TypeError if ``name`` is no text, ValueError if it is not as NAME_RULE says."""
    if not isinstance(name, str):
        raise TypeError(f"{what} is text, not {name!r}")
    if not is_name(name):
        raise ValueError(f"{what}: {name[:40]!r} is not a name: {NAME_RULE}")


def takes_a_name(example: str) -> Callable[[F], F]:
    """Let what makes a decorator raise TypeError, with an example, when it is used like one: without its arguments."""

    def wrap(maker: F) -> F:
        @functools.wraps(maker)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not kwargs and (not args or (len(args) == 1 and callable(args[0]))):
                raise TypeError(f"@{maker.__name__} needs a name: {example}")
            return maker(*args, **kwargs)

        return cast("F", checked)

    return wrap
