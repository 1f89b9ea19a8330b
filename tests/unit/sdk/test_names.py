"""Names are refused where they are written, by the rule of the manifests that will say them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fencepost import step, undo, workflow
from fencepost.names import NAME_RULE, is_name
from fencepost_server.domain import manifest_reader
from fencepost_server.domain.manifest_reader import Faults, ObjectReader

NAMES = ["a", "9", "a" * 200, "mail.send", "a/b_c-D.e", "A/", "0-", "a//b"]
NO_NAMES = ["", "a" * 201, "my step", ".a", "-a", "_a", "/a", "a\n", "\na", "é", "aé", "a:b", "a\0", "٣", "a+b", "(a)"]


def code(name: str, *, queue: str = "default") -> Callable[[Any], Any]:
    return workflow(name, compatibility_id="1", queue=queue)


async def function(ctx: Any) -> None: ...


DECORATORS = pytest.mark.parametrize("decorator", [step, undo, code])


@pytest.mark.parametrize("name", NAMES + NO_NAMES)
def test_the_sdk_and_the_manifests_of_the_server_have_one_rule(name: str) -> None:
    faults = Faults(10)
    ObjectReader({"step": name}, "", faults).name("step")
    assert is_name(name) is (faults.count == 0) is (name in NAMES)
    assert NAME_RULE == manifest_reader.NAME_RULE


@DECORATORS
def test_what_no_manifest_could_name_is_refused_at_the_decorator(decorator: Any) -> None:
    for name in NO_NAMES:
        with pytest.raises(ValueError, match="is not a name: 1 to 200 letters"):
            decorator(name)(function)
        with pytest.raises(ValueError, match=r"'s queue: .* is not a name: 1 to 200 letters"):
            decorator("w", queue=name)(function)
    with pytest.raises(TypeError, match="is text, not 5"):
        decorator(5)(function)
    for name in NAMES:
        assert decorator(name, queue=name)(function).queue == name


@pytest.mark.parametrize(
    ("decorator", "example"),
    [
        (step, '@step needs a name: @step("name")'),
        (undo, '@undo needs a name: @undo("name")'),
        (workflow, '@workflow needs a name: @workflow("name", compatibility_id="1")'),
    ],
)
def test_a_decorator_without_a_name_says_how_it_is_written(decorator: Any, example: str) -> None:
    with pytest.raises(TypeError) as bare:
        decorator(function)
    with pytest.raises(TypeError) as empty:
        decorator()
    assert str(bare.value) == str(empty.value) == example
