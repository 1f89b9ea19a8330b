"""Workflow manifests: what a deployer writes, checked in full and brought to the one form that is hashed.

`parse_manifest` finds all faults at once. What it returns depends only on what the manifest means: key order,
JSON or YAML, `30s` or `30000ms`, and defaults that are spelled out change neither `canonical` nor `hash`, and
so a default that a later release adds changes no old hash either. `canonical` is itself a manifest, with the
same hash.

`manifest_nodes` reads the nodes, `flow_schemas` compares what flows between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from fencepost_server.domain.flow_schemas import match_schemas
from fencepost_server.domain.jsontext import JsonError, canonical_value, parse
from fencepost_server.domain.manifest_diff import difference
from fencepost_server.domain.manifest_nodes import NodeReader
from fencepost_server.domain.manifest_reader import NAME_RULE, Faults, ObjectReader
from fencepost_server.domain.nodes import Node, StepNode
from fencepost_server.domain.policy import RetryPolicy
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
    code: str | None = None
    """Of a code workflow: the queue of its DECIDE tasks. It has no nodes."""


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
    retention_seconds = top.seconds("retention", "1m", "3650d")
    reader = NodeReader(workflow_id, limits.max_nodes, faults)
    code = _read_code(top)
    nodes = reader.read(top) if code is None else ()
    top.finish()
    if code is None:
        match_schemas(input_schema, output_schema, nodes, reader.unread, faults)
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
        nodes,
        canonical,
        sha256(canonical.encode()).digest(),
        retention_seconds,
        frozenset(reader.children),
        code,
    )


def _read_code(top: ObjectReader) -> str | None:
    """The queue of a code workflow; None if it is a graph."""
    if "code" not in top:
        return None
    if "sequence" in top:
        top.fault("sequence", "a workflow is either code or a sequence")
    spec = top.inner("code")
    queue = spec.name("queue", "default")
    spec.finish()
    top.canonical["code"] = spec.canonical
    return queue


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
