"""What a graph definition is at run time: its nodes with their compiled schemas, by position.

A sequence's decider is small: when node i completes, its output is the input of node i + 1, or the run's output.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.manifest import Manifest, ManifestInvalid, StepNode, parse_manifest
from fencepost_server.domain.schema import CompiledSchema, compile_schema
from fencepost_server.domain.violation import Violation


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One step of the sequence. ``checks``: what its output has to satisfy."""

    step: StepNode
    lease_ms: int
    timeout_ms: int | None
    checks: tuple[CompiledSchema, ...]

    def violations(self, output: object) -> list[Violation]:
        """Every fault of an output, against the node's own schema and what follows it."""
        for check in self.checks:
            if faults := check.violations(output):
                return faults
        return []


@dataclass(frozen=True, slots=True)
class Graph:
    """A definition, ready to decide with."""

    manifest: Manifest
    hash: bytes
    input_checks: tuple[CompiledSchema, ...]
    nodes: tuple[GraphNode, ...]

    def input_violations(self, value: object) -> list[Violation]:
        """Every fault of a run's input."""
        for check in self.input_checks:
            if faults := check.violations(value):
                return faults
        return []


def compile_graph(canonical_manifest: str) -> Graph:
    """From a manifest that was valid when it was registered. Raises ManifestInvalid if this release can't read it."""
    return compile_manifest(parse_manifest(canonical_manifest))


def compile_manifest(manifest: Manifest) -> Graph:
    """From a valid manifest.

    A schema that registration could not compare with its neighbour (``schema_check: runtime`` on the receiving
    node) is checked here, with the output that meets it: the step that made the output is told, and can do
    better.
    """
    nodes = []
    steps = _steps(manifest)
    following = [*steps[1:], None]
    for step, after in zip(steps, following, strict=True):
        schemas = [step.output_schema]
        if after is None:
            schemas.append(manifest.output_schema)
        elif after.schema_check == "runtime":
            schemas.append(after.input_schema)
        nodes.append(
            GraphNode(
                step,
                round(step.lease_seconds * 1000),
                None if step.timeout_seconds is None else round(step.timeout_seconds * 1000),
                _compiled(*schemas),
            )
        )
    return Graph(manifest, manifest.hash, _compiled(manifest.input_schema, steps[0].input_schema), tuple(nodes))


def _steps(manifest: Manifest) -> list[StepNode]:
    steps = []
    for index, node in enumerate(manifest.nodes):
        if not isinstance(node, StepNode):
            raise ManifestInvalid((Violation(f"/sequence/{index}", "is no step, and only steps can be run"),))
        steps.append(node)
    return steps


def _compiled(*schemas: object) -> tuple[CompiledSchema, ...]:
    """Each distinct schema once; told apart canonically, because Python's 1 == True."""
    distinct = {canonical_value(schema): schema for schema in schemas if schema is not None}
    return tuple(compile_schema(schema) for schema in distinct.values())
