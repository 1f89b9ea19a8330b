"""Graph programs made by chance from a seed: the workflows of tests/properties, with times that pass, and a script for
each of their steps.

What a step does hangs on the program's seed and the step's node alone, which its input carries. A script is a list of
stages, each one attempt that goes wrong in its own way; a checkpoint before it tells the next attempt how far the
script has come. So faults add attempts, and change nothing of what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.properties import workflows
from tests.properties.workflows import Manifest

PREFIX = "soak-"
SIGNALS = 4
SIGNAL = {"way": 2, "items": [1]}
"""What every signal carries: which wait takes which of them is chance."""
RETRY = {"initial_delay": "20ms", "max_delay": "200ms", "max_attempts": 1000, "max_corrective_attempts": 4}
LEASE = 10.0
"""Seconds, of each step of a graph."""
TIMES = {"timeout": "4s", "lease": f"{LEASE:g}s"}
STAGES = ("operational", "operational", "corrective", "corrective", "soon", "hang", "acted")
"""How an attempt goes wrong: ``soon`` with a retry_after, ``hang`` until its timeout, ``acted`` after the effect."""
CHECKED = PREFIX + "two"
"""The workflow whose step a has an output schema: there an attempt may also break that, ``mismatch``."""
ACTIONS = ("", "", "", "", "pause", "cancel", "terminate")


@dataclass(frozen=True, slots=True)
class GraphProgram:
    """One run of a workflow: what it is given, and what is done to it (``action``, so many seconds after its start).

    ``retry``: when it has failed for good, it is retried once.
    """

    seed: int
    workflow_id: str
    input: Mapping[str, Any]
    action: str
    after: float
    retry: bool
    start_delay: float

    @property
    def determined(self) -> bool:
        """Whether its end hangs on nothing but its seed: not on when it is cancelled, nor on who of several fails."""
        if self.action in {"cancel", "terminate"}:
            return False
        return not (failing(self.seed) and {"parallel", "map"} & set(_kinds(MANIFESTS[self.workflow_id]["sequence"])))


@dataclass(frozen=True, slots=True)
class Script:
    """What the attempts of one step do: the stages, then the output, each after ``seconds``."""

    stages: tuple[str, ...]
    output: Any
    seconds: float


def _timed(value: Any) -> Any:
    """A node, or what has nodes inside, as the soak runs it."""
    if isinstance(value, list):
        return [_timed(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    node = {key: _timed(part) for key, part in value.items()}
    if isinstance(node.get("step"), str) and "id" in node:
        node |= {"retry": RETRY, **TIMES}
        node["input"] = {"seed": {"$from": "#/seed"}, "node": node["id"], "data": value.get("input")}
        if "undo" in node:
            node["undo"] = {**node["undo"], "retry": RETRY, "lease": TIMES["lease"]}
    if "sleep" in node:
        node["sleep"] = "1s500ms" if node["sleep"] == "30d" else node["sleep"]
    if "wait_signal" in node and "timeout" in node:
        node["timeout"] = "1h"
    return node


def _soaked(manifest: Manifest) -> Manifest:
    return {**manifest, "id": PREFIX + manifest["id"], "sequence": _timed(manifest["sequence"])}


MANIFESTS: Mapping[str, Manifest] = {
    manifest["id"]: manifest for manifest in map(_soaked, (*workflows.PLAIN, *workflows.WHOLE))
}
HANDLERS = sorted(frozenset().union(*map(workflows.handlers, MANIFESTS.values())))


def _kinds(value: Any) -> Iterator[str]:
    """All keys of a manifest's nodes."""
    if isinstance(value, Mapping):
        yield from value
        for part in value.values():
            yield from _kinds(part)
    elif isinstance(value, list):
        for part in value:
            yield from _kinds(part)


def _steps(value: Any) -> Iterator[str]:
    """The ids of the nodes that are steps."""
    if isinstance(value, Mapping):
        if isinstance(value.get("step"), str) and "id" in value:
            yield value["id"]
        for part in value.values():
            yield from _steps(part)
    elif isinstance(value, list):
        for part in value:
            yield from _steps(part)


def graph_program(seed: int) -> GraphProgram:
    """The program of a seed: the same in every process."""
    rng = Random(f"graph {seed}")
    workflow_id = rng.choice(sorted(MANIFESTS))
    given = {"seed": seed, **rng.choice(workflows.INPUTS)}
    action, after = rng.choice(ACTIONS), rng.uniform(0.0, 4.0)
    return GraphProgram(seed, workflow_id, given, action, after, rng.random() < 0.5, rng.choice((0.0, 0.0, 0.0, 1.0)))


def failing(seed: int) -> str:
    """The node whose step fails for good once; "" for most programs."""
    rng = Random(f"fails {seed}")
    nodes = sorted(set(_steps(MANIFESTS[graph_program(seed).workflow_id]["sequence"])))
    return rng.choice(nodes) if nodes and rng.random() < 0.25 else ""


def script(seed: int, node_id: str) -> Script:
    """What the step of a node does."""
    rng = Random(f"step {seed} {node_id}")
    stages = rng.sample(STAGES, rng.choice((0, 0, 0, 1, 1, 2)))
    if node_id == "a" and graph_program(seed).workflow_id == CHECKED and rng.random() < 0.5:
        stages.append("mismatch")
    if failing(seed) == node_id:
        stages.append("permanent")
    return Script(tuple(stages), rng.choice(workflows.INPUTS), _seconds(rng))


def undo_script(seed: int, node_id: str) -> Script:
    """What the undoing of a node does. ``permanent`` blocks its run until that is retried."""
    rng = Random(f"undo {seed} {node_id}")
    stages = rng.choice(((), (), (), ("operational",), ("corrective",), ("permanent",)))
    return Script(stages, None, _seconds(rng))


def _seconds(rng: Random) -> float:
    """Mostly next to nothing; some are at work when a fault comes."""
    return rng.choice((0.0, 0.01, 0.05, 0.2, 0.2, 1.0, 2.0))
