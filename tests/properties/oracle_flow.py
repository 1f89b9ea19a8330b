"""The oracle's control flow: which node begins when another is done, and what that leaves in the history.

Outputs go from node to node; a place knows what encloses it, so whatever ends tells the next around it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tests.properties.oracle_model import (
    FINAL,
    Event,
    Failure,
    Node,
    Place,
    Policy,
    Scope,
    Task,
    Timer,
    Undoable,
    Value,
    Wait,
    seconds,
)

MISSING = object()


def follow(value: Any, pointer: str) -> Any:
    """What is at a JSON Pointer without escapes, or MISSING."""
    for key in pointer.split("/")[1:]:
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return MISSING
    return value


def holds(condition: Mapping[str, Any], value: Any) -> bool:
    """Whether a value meets a condition with ``eq``, ``gt`` or ``exists``: those that the tests' manifests have."""
    found = follow(value, condition["at"])
    if "exists" in condition:
        return (found is not MISSING) is condition["exists"]
    if found is MISSING:
        return False
    if "eq" in condition:
        return bool(found == condition["eq"] and isinstance(found, bool) == isinstance(condition["eq"], bool))
    number = isinstance(found, int | float) and not isinstance(found, bool)
    return bool(number and found > condition["gt"])


class Flow(ABC):
    """A run as far as control flow goes: its history, and what is open in it."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.nodes: tuple[Node, ...] = tuple(manifest["sequence"])
        self.events: list[Event] = []
        self.tasks: dict[int, Task] = {}
        self.timers: list[Timer] = []
        self.waits: list[Wait] = []
        self.signals: list[tuple[int, str, Any]] = []
        self.undo_log: list[Undoable] = []
        self.output: Value | None = None
        self.failure: Failure | None = None
        self.ending: tuple[str, Failure] | None = None
        self.fixed_state = ""
        self.touched = False
        self.now = 0.0
        self.outputs: dict[str, Any] = {}
        self.again: list[tuple[Place, Value]] = []
        self._queue: deque[tuple[Place, Value]] = deque()

    @property
    def state(self) -> str:
        """The state that a caller is told."""
        if self.fixed_state:
            return self.fixed_state
        if not self.tasks:
            return "WAITING"
        return "RUNNING" if self.touched else "PENDING"

    @property
    def final(self) -> bool:
        """Nothing but RetryRun of a failed run changes it any more."""
        return self.fixed_state in FINAL

    def emit(self, what: str, **fields: object) -> int:
        """Append an event and return its number."""
        self.events.append(Event(what, fields))
        return len(self.events)

    @abstractmethod
    def node_failed(self, failure: Failure) -> None:
        """A node has failed for good; its own event is written."""

    # Nodes begin

    def begin(self, place: Place, value: Value) -> None:
        """Start the node at a place with its input, after those that are to be started already."""
        self._queue.append((place, value))
        if len(self._queue) > 1:
            return
        while self._queue:
            if self.ending is None:
                self._begin(*self._queue[0])
            else:
                self.again.append(self._queue[0])
            self._queue.popleft()

    def _begin(self, place: Place, value: Value) -> None:
        node = place.node
        if "step" in node:
            built = self._built(place, value)
            if built is not None:
                self._begin_step(place, built)
        elif "sleep" in node:
            due = self.now + seconds(node["sleep"])
            seq = self.emit("timer_started", node_id=node["id"], scope_id=place.scope_id, item=place.item)
            self.timers.append(Timer(seq, "SLEEP", due, place, value))
        elif "wait_signal" in node:
            self._begin_wait(place)
        elif "parallel" in node:
            self._begin_parallel(place, value)
        elif "map" in node:
            self._begin_map(place, value)
        else:
            self._begin_choose(place, value)

    def _built(self, place: Place, value: Value) -> Value | None:
        """The input of a step by its mapping, if it has one; None: that leads nowhere."""
        if "input" not in place.node:
            return value
        data = self._filled(place.node["input"])
        if data is MISSING:
            self._node_failed(place, value)
            return None
        return Value(data, self.emit("input_built", node_id=place.node["id"], input=data))

    def _filled(self, template: Any) -> Any:
        if isinstance(template, list):
            parts = [self._filled(part) for part in template]
            return MISSING if MISSING in parts else parts
        if not isinstance(template, dict):
            return template
        if template.keys() == {"$from"}:
            source, _, pointer = template["$from"].partition("#")
            return follow(self.outputs[source], pointer)
        members = {key: self._filled(part) for key, part in template.items()}
        return MISSING if MISSING in members.values() else members

    def _node_failed(self, place: Place, value: Value) -> None:
        """A node could not begin."""
        failure = Failure("PERMANENT", "INVALID_NODE_INPUT", place.node["id"])
        self.emit("node_failed", node_id=place.node["id"], failure=failure)
        self.again.append((place, value))
        self.node_failed(failure)

    def _begin_step(self, place: Place, value: Value) -> None:
        node = place.node
        task_id = self.emit(
            "step_scheduled",
            node_id=node["id"],
            handler=node["step"],
            queue="default",
            input_seq=value.seq,
            scope_id=place.scope_id,
            item=place.item,
        )
        policy = Policy.of(node.get("retry", {}))
        lease = seconds(node.get("lease", "1m"))
        self.tasks[task_id] = Task(task_id, node, place, value, node["step"], policy, lease, ready_at=self.now)
        for key, kind in (("queue_timeout", "QUEUE_TIMEOUT"), ("total_timeout", "TOTAL_TIMEOUT")):
            if key in node:
                self.timers.append(Timer(task_id, kind, self.now + seconds(node[key]), place))

    def _begin_wait(self, place: Place) -> None:
        node = place.node
        seq = self.emit(
            "signal_awaited",
            node_id=node["id"],
            signal_name=node["wait_signal"],
            scope_id=place.scope_id,
            item=place.item,
        )
        self.waits.append(Wait(seq, node["wait_signal"], place))
        if "timeout" in node:
            self.timers.append(Timer(seq, "SIGNAL_TIMEOUT", self.now + seconds(node["timeout"]), place))
        touched = self.touched
        self.take_signals()
        self.touched = touched

    def _begin_parallel(self, place: Place, value: Value) -> None:
        branches: Sequence[Sequence[Node]] = place.node["parallel"]
        scope = self._open_scope(place, value, [tuple(branch) for branch in branches])
        for item, branch in enumerate(scope.items):
            self.begin(Place(branch, 0, scope, item), value)

    def _begin_map(self, place: Place, value: Value) -> None:
        items = follow(value.data, place.node["map"]["over"])
        if not isinstance(items, list):
            self._node_failed(place, value)
            return
        scope = self._open_scope(place, value, items)
        for item, data in enumerate(items):
            scope.inputs.append(
                self.emit("item_opened", node_id=place.node["id"], scope_id=scope.scope_id, item=item, input=data)
            )
        for _ in range(min(len(items), place.node["map"].get("max_parallel", 10))):
            self._begin_item(scope)
        if not items:
            self._close(scope)

    def _begin_item(self, scope: Scope) -> None:
        item, scope.next_item = scope.next_item, scope.next_item + 1
        body = tuple(scope.place.node["map"]["do"])
        self.begin(Place(body, 0, scope, item), Value(scope.items[item], scope.inputs[item]))

    def _open_scope(self, place: Place, value: Value, items: list[Any]) -> Scope:
        scope_id = self.emit(
            "scope_opened",
            node_id=place.node["id"],
            items=len(items),
            input_seq=value.seq,
            scope_id=place.scope_id,
            item=place.item,
        )
        return Scope(scope_id, place, items)

    def _begin_choose(self, place: Place, value: Value) -> None:
        node = place.node
        fits = (i for i, case in enumerate(node["choose"]) if "when" not in case or holds(case["when"], value.data))
        index = next(fits, -1)
        self.emit("choice_made", node_id=node["id"], case_index=index)
        if index < 0:
            self.done(place, value)
            return
        case = node["choose"][index]
        body = tuple(case["do"] if "when" in case else case["otherwise"])
        self.begin(Place(body, 0, place.scope, place.item, place), value)

    # Nodes end

    def done(self, place: Place, value: Value) -> None:
        """The node at a place has its output: go on with what follows it, or with what encloses it."""
        if place.scope is None:
            self.outputs[place.node["id"]] = value.data
        if place.index + 1 < len(place.nodes):
            self.begin(Place(place.nodes, place.index + 1, place.scope, place.item, place.choice), value)
        elif place.choice is not None:
            self.done(place.choice, value)
        elif place.scope is None:
            self.emit("run_completed", output_seq=value.seq)
            self.output = value
            self.settle_as("COMPLETED")
        else:
            self._item_done(place.scope, place.item, value.data)

    def _item_done(self, scope: Scope, item: int, output: Any) -> None:
        scope.outputs[item] = output
        if "map" in scope.place.node and scope.next_item < len(scope.items):
            self._begin_item(scope)
        elif len(scope.outputs) == len(scope.items):
            self._close(scope)

    def _close(self, scope: Scope) -> None:
        node = scope.place.node
        joined: Any
        if "map" in node:
            joined = [scope.outputs[item] for item in range(len(scope.items))]
        else:
            joined = {branch[-1]["id"]: scope.outputs[item] for item, branch in enumerate(scope.items)}
        seq = self.emit("scope_closed", node_id=node["id"], scope_id=scope.scope_id, output=joined)
        self.done(scope.place, Value(joined, seq))

    def settle_as(self, state: str) -> None:
        """Enter a final state: nothing stays open."""
        self.fixed_state = state
        self.tasks, self.timers, self.waits, self.signals = {}, [], [], []

    # Signals

    def take_signals(self) -> None:
        """Let waits take signals of their name, in order, each once; not in a pause, nor when the run ends."""
        for wait in list(self.waits):
            signal = next((signal for signal in self.signals if signal[1] == wait.name), None)
            if signal is None or wait not in self.waits or self.ending or self.fixed_state == "PAUSED":
                continue
            seq, _, payload = signal
            self.signals.remove(signal)
            self.drop_wait(wait)
            self.touched = True
            self.emit("signal_taken", node_id=wait.place.node["id"], wait_seq=wait.seq, signal_seq=seq)
            self.done(wait.place, Value(payload, seq))

    def drop_wait(self, wait: Wait) -> None:
        """The wait is over, and its timeout with it."""
        self.waits.remove(wait)
        self.timers = [timer for timer in self.timers if timer.seq != wait.seq]
