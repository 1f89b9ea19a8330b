"""Workflow manifests: what a deployer writes, checked in full and brought to the one form that is hashed.

`parse_manifest` finds all faults at once. What it returns depends only on what the manifest means: key order,
JSON or YAML, `30s` or `30000ms`, and defaults that are spelled out change neither `canonical` nor `hash`, and
so a default that a later release adds changes no old hash either. `canonical` is itself a manifest, with the
same hash.

Each kind of node has a reader in `_KINDS`, found by the key that names it. What the language has and this
release does not act on is listed in `_UNSUPPORTED_*`, and refused as such rather than as unknown: a manifest
is never half obeyed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from fencepost_server.domain.durations import format_duration
from fencepost_server.domain.jsontext import JsonError, canonical_value, parse
from fencepost_server.domain.manifest_diff import difference
from fencepost_server.domain.manifest_reader import NAME_RULE, Faults, ObjectReader
from fencepost_server.domain.nodes import Node, StepNode
from fencepost_server.domain.policy import RetryPolicy
from fencepost_server.domain.schema_match import WorkBudget, mismatch
from fencepost_server.domain.violation import Violation
from fencepost_server.domain.yamltext import YamlError, parse_yaml

__all__ = [
    "NAME_RULE",
    "Manifest",
    "ManifestInvalid",
    "ManifestLimits",
    "RetryPolicy",
    "StepNode",
    "Violation",
    "difference",
    "parse_manifest",
]

_SOON = "{} is not supported by this server release"
_UNSUPPORTED_KINDS = ("sleep", "wait_signal", "parallel", "map", "choose", "workflow")
_UNSUPPORTED_OF_STEP = {
    key: _SOON.format(key) for key in ("input", "queue_timeout", "total_timeout", "undo", *_UNSUPPORTED_KINDS)
}

_DEFAULTS = RetryPolicy()
# Work for the comparison of all schemas of one manifest: a second or two at the worst.
_MATCHING_WORK = 200_000


@dataclass(frozen=True, slots=True)
class ManifestLimits:
    """How large a manifest may be: bytes of UTF-8, as sent and as canonical text; nodes; faults listed."""

    max_bytes: int = 1 << 20
    max_nodes: int = 1_000
    max_violations: int = 100


@dataclass(frozen=True, slots=True)
class Manifest:
    """A valid manifest. `canonical` is its one canonical JSON text, `hash` the 32 bytes of its SHA-256.

    `retention_seconds` is how long ended runs are kept, None: as long as the server's default says. `children`
    has the ids of the workflows that child nodes run, wherever they stand.
    """

    workflow_id: str
    compatibility_id: str
    input_schema: object | None
    output_schema: object | None
    nodes: tuple[Node, ...]
    canonical: str
    hash: bytes
    retention_seconds: float | None = None
    children: frozenset[str] = frozenset()


class ManifestInvalid(ValueError):
    """A manifest has faults: `violations` has them, with JSON Pointers into it, up to a limit."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{fault.path or 'manifest'}: {fault.message}" for fault in violations[:5]))
        self.violations = violations


def parse_manifest(text: str, *, yaml: bool = False, limits: ManifestLimits | None = None) -> Manifest:
    """Read a manifest in JSON or YAML.

    The reader of YAML takes seconds for a megabyte: keep large ones off an event loop.

    Raises:
        ManifestInvalid: with all faults; a syntax error stands alone, with its line and column.
    """
    limits = limits or ManifestLimits()
    faults = Faults(limits.max_violations)
    value = _read_text(text, yaml, limits, faults)
    _refuse(faults)
    top = ObjectReader(value, "", faults)
    workflow_id, compatibility_id = top.name("id"), top.name("compatibility_id")
    input_schema, output_schema = top.schema("input_schema"), top.schema("output_schema")
    places: dict[str, str] = {}
    spelled: list[object] = []
    nodes: list[StepNode | None] = []
    for item, path in top.items("sequence", limits.max_nodes):
        reader = ObjectReader(item, path, faults)
        nodes.append(_read_node(reader, places))
        spelled.append(reader.canonical)
    top.canonical["sequence"] = spelled
    top.finish({})
    _match_schemas(input_schema, output_schema, nodes, faults)
    _refuse(faults)
    canonical = canonical_value(top.canonical)
    size = len(canonical.encode())
    if size > limits.max_bytes:
        faults.add("", f"has {size} bytes in its canonical form; at most {limits.max_bytes} are accepted")
        _refuse(faults)
    return Manifest(
        workflow_id,
        compatibility_id,
        input_schema,
        output_schema,
        tuple(node for node in nodes if node is not None),
        canonical,
        sha256(canonical.encode()).digest(),
    )


def _refuse(faults: Faults) -> None:
    if faults.count:
        raise ManifestInvalid(faults.violations())


def _read_text(text: str, yaml: bool, limits: ManifestLimits, faults: Faults) -> object:
    # A lone surrogate cannot be encoded, but must be counted; the parsers refuse it.
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > limits.max_bytes:
        faults.add("", f"has {size} bytes; at most {limits.max_bytes} are accepted")
        return None
    try:
        return parse_yaml(text) if yaml else parse(text)
    except JsonError as error:
        faults.add("", error.message)
    except YamlError as error:
        for fault in error.violations:
            faults.add(fault.path, fault.message)
    return None


def _read_node(reader: ObjectReader, places: dict[str, str]) -> StepNode | None:
    """Read one node of any kind; `places` has the paths of the ids seen so far."""
    if not reader.is_object:
        return None
    node_id = reader.name("id")
    if node_id in places:
        reader.fault("id", f"{node_id} is already the id of {places[node_id]}")
    elif node_id:
        places[node_id] = reader.path
    for kind in _UNSUPPORTED_KINDS:
        if kind in reader and "step" not in reader:
            reader.fault(kind, _SOON.format(kind))
            return None
    kind = next((kind for kind in _KINDS if kind in reader), "step")
    return _KINDS[kind](reader, node_id)


def _read_step(reader: ObjectReader, node_id: str) -> StepNode:
    timeout = reader.duration("timeout", "1ms", "365d")
    lease = reader.duration("lease", "1s", "1d", "1m")
    node = StepNode(
        id=node_id,
        handler=reader.name("step"),
        queue=reader.name("queue", "default"),
        input_schema=reader.schema("input_schema"),
        output_schema=reader.schema("output_schema"),
        timeout_seconds=None if timeout is None else timeout / 1000,
        lease_seconds=(lease or 0) / 1000,
        retry=_read_retry(reader),
        schema_check=reader.choice("schema_check", ("strict", "runtime")),
    )
    reader.finish(_UNSUPPORTED_OF_STEP)
    return node


def _read_retry(node: ObjectReader) -> RetryPolicy:
    reader = node.inner("retry")
    initial_delay = reader.duration("initial_delay", "0s", "7d", "1s") or 0
    max_delay = reader.duration("max_delay", "0s", "7d", "1m") or 0
    if initial_delay > max_delay:
        longest = format_duration(max_delay)
        reader.fault("initial_delay", f"{format_duration(initial_delay)} is longer than max_delay ({longest})")
    policy = RetryPolicy(
        max_attempts=reader.integer("max_attempts", 1, 1_000_000, _DEFAULTS.max_attempts),
        initial_delay_seconds=initial_delay / 1000,
        multiplier=reader.number("multiplier", 1, 1_000, _DEFAULTS.multiplier),
        max_delay_seconds=max_delay / 1000,
        jitter=reader.number("jitter", 0, 1, _DEFAULTS.jitter),
        max_corrective_attempts=reader.integer("max_corrective_attempts", 0, 1_000, _DEFAULTS.max_corrective_attempts),
    )
    reader.finish({})
    if reader.canonical:
        node.canonical["retry"] = reader.canonical
    return policy


def _match_schemas(
    input_schema: object | None,
    output_schema: object | None,
    nodes: Sequence[StepNode | None],
    faults: Faults,
) -> None:
    """Note where one side gives what the next one does not take; a side with faults is not compared."""
    budget = WorkBudget(_MATCHING_WORK)
    given: tuple[str, object | None, str] | None = (
        "/input_schema",
        input_schema,
        "the input of the workflow",
    )
    for index, node in enumerate(nodes):
        path = f"/sequence/{index}"
        if node is None:
            given = None
            continue
        if node.schema_check == "strict":
            _match(given, f"{path}/input_schema", node.input_schema, budget, faults)
        given = (f"{path}/output_schema", node.output_schema, f"the output of {node.id or path}")
    if nodes and nodes[-1] is not None and nodes[-1].schema_check == "strict":
        _match(given, "/output_schema", output_schema, budget, faults)


def _match(
    given: tuple[str, object | None, str] | None,
    path: str,
    taken: object | None,
    budget: WorkBudget,
    faults: Faults,
) -> None:
    if given is None or not faults.bad_schemas.isdisjoint((given[0], path)):
        return
    reason = mismatch(given[1], taken, budget)
    if reason is not None:
        faults.add(path, f"does not take {given[2]} ({given[0]}): {reason}")


_KINDS: dict[str, Callable[[ObjectReader, str], StepNode]] = {"step": _read_step}
