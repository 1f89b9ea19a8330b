"""Addresses are tried in turn, and tries are spread over time."""

from __future__ import annotations

import pytest

from fencepost.channel import Backoff, Targets


def test_addresses_are_tried_in_turn() -> None:
    targets = Targets("a:1, b:2,")
    seen = []
    for _ in range(3):
        seen.append(targets.current)
        targets.advance(targets.current)
    assert seen == ["a:1", "b:2", "a:1"]


def test_several_who_fail_at_the_same_address_move_on_once() -> None:
    targets = Targets("a:1,b:2")
    for _ in range(2):
        targets.advance("a:1")
    assert targets.current == "b:2"


@pytest.mark.parametrize("text", ["", " , "])
def test_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        Targets(text)


@pytest.mark.parametrize("text", ["localhost", "a:1, b", "10.0.0.1", "http://127.0.0.1:7654", "https://a"])
def test_an_address_without_a_port_or_with_a_scheme_of_the_web_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="say host:port"):
        Targets(text)


@pytest.mark.parametrize(
    "text",
    ["[::1]:7654", "unix:/run/fencepost.sock", "unix-abstract:fencepost", "dns:///fencepost:7654", "xds:///fencepost"],
)
def test_names_that_grpc_resolves_are_taken(text: str) -> None:
    assert Targets(text).current == text


def test_delays_are_random_below_a_limit_that_doubles_up_to_the_most() -> None:
    backoff = Backoff(0.05, 5.0, chance=lambda: 1.0)
    assert [backoff.next() for _ in range(9)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    backoff.reset()
    assert backoff.next() == 0.05
    assert Backoff(chance=lambda: 0.0).next() == 0.0


def test_what_the_server_asks_for_is_the_least() -> None:
    assert Backoff(chance=lambda: 0.5).next(10.0) == pytest.approx(11.0)
    assert Backoff(chance=lambda: 1.0).next(0.01) == 0.05
