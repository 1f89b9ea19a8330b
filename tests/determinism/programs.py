"""Programs made by chance from a seed, over every kind of op and what asyncio has.

A program is a tree of nodes. Each node that asks for something durable is a site with a number of its own, which the
history tells: names of local steps and signals have it, inputs of remote steps and children, and of timers the
microseconds. So what a history says can be read per site, without knowing in which order a function asks.

Two things that happen to branches that race never hang on the same event: each branch begins with a wait of its own.
Clean-up that waits stands only where a cancellation comes from one side at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

MAX_SITES = 500
_SITE = 10
"""Microseconds of a timer's length that tell its site apart from the next."""

SIMPLE = ("local", "local", "remote", "remote", "sleep", "asleep", "signal", "signals", "child", "patch", "attributes",
          "now", "chance", "contend")  # fmt: skip
DURABLE = ("local", "local", "local", "remote", "remote", "sleep", "sleep", "asleep", "child")
NESTED = ("seq", "tries", "gather", "results", "group", "race", "completed", "timeout", "wait_for", "queue", "lock",
          "event", "stop", "choice", "clean_up", "clean_up", "clean_up", "clean_up")  # fmt: skip
CALM_NESTED = tuple(kind for kind in NESTED if kind != "clean_up")
_CALM = frozenset({"gather", "results", "group", "completed", "wait_for", "queue", "lock", "event", "stop"})


@dataclass(frozen=True, slots=True)
class Node:
    """``mode`` says how a step goes: ok, async, fail, flaky, undo. ``tens`` is a timer's length in hundredths of a
    second, ``count`` how many signals are waited for.
    """

    kind: str
    site: int
    parts: tuple[Node, ...] = ()
    mode: str = "ok"
    tens: int = 1
    count: int = 1

    @property
    def seconds(self) -> float:
        """How long a timer of it takes."""
        return (self.tens * MAX_SITES + self.site) * _SITE / 1_000_000

    @property
    def signal(self) -> str:
        """The signal that only this node waits for."""
        return f"s{self.site}"

    def walk(self) -> Iterator[Node]:
        """It and all below it."""
        yield self
        for part in self.parts:
            yield from part.walk()


def site_of_delay(microseconds: int) -> int:
    """The site of a timer: of asyncio's, a microsecond or two may be lost to floating point."""
    return round(microseconds / _SITE) % MAX_SITES


@dataclass(frozen=True, slots=True)
class Program:
    """What the runs of one chain do: each plays a tree, and all but the last continue as new."""

    seed: int
    trees: tuple[Node, ...]

    def signals(self) -> list[Node]:
        """The nodes that wait for signals, which somebody has to send."""
        kinds = {"signal", "signals", "contend"}
        return [node for tree in self.trees for node in tree.walk() if node.kind in kinds]


def program_of(seed: int) -> Program:
    """The program of a seed: the same in every process, on every Python."""
    rng = Random(seed)
    maker = _Maker(rng)
    trees = [maker.tree() for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    for number, tree in enumerate(trees):
        if rng.randrange(3) == 0:
            trees[number] = maker.made("clean_up", parts=(tree, maker.made("local")))
    if rng.randrange(5) == 0:
        # Nobody catches what its last step raises.
        trees[-1] = maker.made("seq", parts=(trees[-1], maker.made("local", mode="fail")))
    return Program(seed, tuple(trees))


@dataclass
class _Maker:
    rng: Random
    sites: int = field(default=0)

    def tree(self) -> Node:
        """What one run does: several things one after the other, of which none makes it fail."""
        parts = [self.node(3, calm=False) for _ in range(self.rng.randint(3, 5))]
        return self.made("tries", parts=(self.leaf(DURABLE), *parts))

    def node(self, depth: int, *, calm: bool) -> Node:
        rng = self.rng
        if depth == 0 or rng.randrange(2) or self.sites > MAX_SITES - 200:
            return self.leaf(SIMPLE)
        kind = rng.choice(CALM_NESTED if calm else NESTED)
        calm = calm or kind in _CALM
        if kind in {"timeout", "wait_for"}:
            return self.made(kind, parts=(self.node(depth - 1, calm=calm),), tens=rng.choice((1, 3, 20)))
        if kind == "clean_up":
            return self.made(kind, parts=(self.node(depth - 1, calm=calm), self.leaf(("clean",))))
        if kind == "stop":
            return self.made(kind, parts=(self.branch(depth - 1, calm=calm), self.leaf(("local", "sleep", "remote"))))
        if kind == "choice":
            parts = tuple(self.node(depth - 1, calm=calm) for _ in range(2))
            return self.made(kind, parts=(self.made("local"), *parts))
        if kind in {"seq", "tries"}:
            return self.made(kind, parts=tuple(self.node(depth - 1, calm=calm) for _ in range(rng.randint(2, 3))))
        return self.made(kind, parts=tuple(self.branch(depth - 1, calm=calm) for _ in range(rng.randint(2, 3))))

    def branch(self, depth: int, *, calm: bool) -> Node:
        """What runs beside others: it waits for something of its own first."""
        return self.made("seq", parts=(self.leaf(DURABLE), self.node(depth, calm=calm)))

    def leaf(self, kinds: tuple[str, ...]) -> Node:
        rng = self.rng
        kind = rng.choice(kinds)
        if kind == "clean":
            return self.made("local", mode="ok")
        if kind == "local":
            return self.made(
                kind, mode=rng.choice(("ok", "async", "ok", "async", "ok", "async", "fail", "flaky", "undo", "undo"))
            )
        if kind == "remote":
            return self.made(kind, mode=rng.choice(("ok", "ok", "ok", "ok", "fail", "flaky", "undo")))
        if kind == "child":
            return self.made(kind, mode=rng.choice(("ok", "ok", "ok", "fail")))
        if kind == "signal":
            return self.made(kind, mode=rng.choice(("ok", "timed")), tens=rng.choice((1, 30)))
        if kind in {"signals", "contend"}:
            return self.made(kind, count=rng.randint(2, 3))
        if kind == "chance":
            # It draws when its step has ended: no two draws hang on one event.
            return self.made(kind, parts=(self.made("local"),))
        return self.made(kind, tens=rng.randint(1, 6))

    def made(self, kind: str, *, parts: tuple[Node, ...] = (), mode: str = "ok", tens: int = 1, count: int = 1) -> Node:
        """A node with a site of its own."""
        self.sites += 1
        assert self.sites < MAX_SITES
        return Node(kind, self.sites, parts, mode, tens, count)
