"""Manifests as values, for the tests of what is read from them."""

from __future__ import annotations

import json

import pytest

from fencepost_server.domain.manifest import Manifest, ManifestInvalid, ManifestLimits, parse_manifest


def node(**more: object) -> dict[str, object]:
    """Return a step node."""
    return {"id": "a", "step": "do", **more}


def manifest(*nodes: object, **more: object) -> dict[str, object]:
    """Return a manifest of these nodes, or of one."""
    return {"id": "wf", "compatibility_id": "1", "sequence": list(nodes) or [node()], **more}


def read(value: object, **limits: int) -> Manifest:
    """Parse a manifest given as a value."""
    return parse_manifest(json.dumps(value), limits=ManifestLimits(**limits))


def faults(value: object, **limits: int) -> list[tuple[str, str]]:
    """Return the faults of a manifest given as a value."""
    with pytest.raises(ManifestInvalid) as refusal:
        read(value, **limits)
    return [(fault.path, fault.message) for fault in refusal.value.violations]
