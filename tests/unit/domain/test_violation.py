"""Pointers and messages of violations."""

from __future__ import annotations

import pytest

from fencepost_server.domain.violation import MAX_MESSAGE, cut_message, pointer


@pytest.mark.parametrize(
    ("parts", "expected"),
    [([], ""), ([""], "/"), (["a", 0, "b"], "/a/0/b"), (["a/b", "m~n", "~1"], "/a~1b/m~0n/~01")],
)
def test_a_pointer_escapes_what_rfc_6901_escapes(parts: list[str | int], expected: str) -> None:
    assert pointer(parts) == expected


@pytest.mark.parametrize("length", [0, 1, MAX_MESSAGE])
def test_a_message_that_fits_is_left_alone(length: int) -> None:
    assert cut_message("é" * length) == "é" * length


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 10 * MAX_MESSAGE])
def test_a_message_that_is_too_long_loses_its_middle(length: int) -> None:
    cut = cut_message("<" + "😀" * (length - 2) + ">")
    assert len(cut) == MAX_MESSAGE
    assert cut[0] == "<"
    assert cut[-1] == ">"
    assert " … " in cut
