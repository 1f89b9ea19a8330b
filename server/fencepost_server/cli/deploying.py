"""`fencepost definitions activate|remove|diff`: which definition new runs take, and how two of them differ."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.caller import Caller
from fencepost_server.cli.definitions import (
    SHORT_HASH,
    UnreadableFile,
    is_prefix,
    names_file,
    only_one,
    readable,
    whole_hash,
)
from fencepost_server.cli.faults import CommandFailed, WrongUsage
from fencepost_server.cli.output import aligned, show_pairs, visible, write_json, write_line
from fencepost_server.cli.waiting import TIMED_OUT

if TYPE_CHECKING:
    from fencepost import Client, Definition, Removal

_ASK_AGAIN = 0.5
_MOST_COUNTED = 10_000

Workflow = Annotated[str, typer.Argument(metavar="WORKFLOW", show_default=False)]
Hash = Annotated[
    str, typer.Argument(metavar="HASH", help="The hash of a definition, or its first 8 digits.", show_default=False)
]


def activate(caller: Caller, workflow: Workflow, definition: Hash) -> None:
    """Let new runs take a definition that is registered: roll back to it. Runs in flight stay on theirs."""
    from fencepost_server.cli.documents import definition_document

    with caller.connect() as client:
        activated = client.activate_definition(workflow, whole_hash(client, workflow, definition))
    if caller.json:
        document = definition_document(activated.definition, listed=True)
        write_json({**document, "previous_hash": activated.previous_hash})
        return
    show_pairs(
        [
            ("workflow", activated.definition.workflow_id),
            ("active", _named(activated.definition)),
            ("before", activated.previous_hash[:SHORT_HASH]),
        ]
    )


def _named(definition: Definition) -> str:
    return f"{definition.definition_hash[:SHORT_HASH]} (compatibility id {definition.compatibility_id})"


def remove(
    caller: Caller,
    workflow: Workflow,
    definition: Hash,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all of its runs have ended.")] = False,
    wait_timeout: Annotated[
        float | None,
        typer.Option("--wait-timeout", metavar="SECONDS", min=0, help="How long to wait. Default: until they have."),
    ] = None,
) -> None:
    """Remove a definition for good: no run starts with it, and its runs are ended, their completed steps undone.

    Exit code 4: it was removed, but some of its runs had not ended when the time to wait was over.
    """
    with caller.connect() as client:
        hash_ = whole_hash(client, workflow, definition)
        if not yes:
            _confirm(client, workflow, hash_)
        end = None if wait_timeout is None else time.monotonic() + wait_timeout
        removal = client.remove_definition(workflow, hash_)
        while wait and removal.remaining_runs and (end is None or time.monotonic() < end):
            time.sleep(_ASK_AGAIN)
            removal = client.remove_definition(workflow, hash_)
    _show_removal(caller, removal)
    if wait and removal.remaining_runs:
        raise typer.Exit(TIMED_OUT)


def _confirm(client: Client, workflow: str, hash_: str) -> None:
    """Ask on the terminal, which is not where the answer goes. Raises WrongUsage without one."""
    if not sys.stdin.isatty():
        raise WrongUsage("say --yes: the runs of the definition are ended, and it can't be brought back")
    found = client.get_definition(workflow, hash_)
    state = found.state.value
    typer.confirm(
        f"Remove the {state} definition {_named(found)} of workflow {found.workflow_id}?"
        " Its runs are ended, and it can't be brought back.",
        abort=True,
        err=True,
    )


def _show_removal(caller: Caller, removal: Removal) -> None:
    from fencepost_server.cli.documents import definition_document

    if caller.json:
        document = definition_document(removal.definition, listed=True)
        write_json({**document, "remaining_runs": removal.remaining_runs})
        return
    remaining = removal.remaining_runs
    show_pairs(
        [
            ("workflow", removal.definition.workflow_id),
            ("definition", _named(removal.definition)),
            ("state", removal.definition.state.value),
            ("runs that go on", f"{remaining} or more" if remaining >= _MOST_COUNTED else str(remaining)),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two that are compared."""

    word: str
    workflow_id: str
    compatibility_id: str
    hash: str
    state: str
    manifest: str

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "given": self.word,
            "definition_hash": self.hash,
            "compatibility_id": self.compatibility_id,
            "state": self.state or None,
        }

    def __str__(self) -> str:
        origin = self.state or self.word
        return f"{self.hash[:SHORT_HASH]} (compatibility id {self.compatibility_id}, {origin})"


Compared = Annotated[
    str,
    typer.Argument(help="The hash of a definition, its first 8 digits, or the file of a manifest.", show_default=False),
]


def diff(
    caller: Caller,
    a: Compared,
    b: Compared,
    workflow: Annotated[
        str, typer.Option("--workflow", help="Look for hashes among those of this workflow.", show_default=False)
    ] = "",
) -> None:
    """Tell how two definitions of one workflow differ, a line each: place, value in A → value in B.

    Either may be the file of a manifest, registered or not.
    """
    from fencepost_server.domain.manifest_diff import difference

    words = list(dict.fromkeys((a, b)))
    sides = {word: _of_file(word) for word in words if names_file(word)}
    if missing := [word for word in words if word not in sides]:
        sides |= _registered(caller, missing, workflow)
    old, new = sides[a], sides[b]
    if old.workflow_id != new.workflow_id:
        raise CommandFailed(f"they are of two workflows: {old.workflow_id} and {new.workflow_id}")
    lines = difference(old.manifest, new.manifest, sys.maxsize)
    if caller.json:
        write_json(
            {"workflow_id": old.workflow_id, "a": old.document(), "b": new.document(), "differences": lines},
        )
        return
    show_pairs([("workflow", old.workflow_id), ("a", str(old)), ("b", str(new))])
    write_line("")
    for line in lines or ["no difference"]:
        write_line(visible(line))


def _of_file(word: str) -> _Side:
    """Read a manifest without a server. Raises CommandFailed with all of its faults."""
    from fencepost_server.domain.manifest import ManifestInvalid, parse_manifest

    try:
        source = readable(word)
    except UnreadableFile as error:
        raise CommandFailed(f"{word}: {error}") from None
    text = source if isinstance(source, str) else source.read_text("utf-8")
    try:
        manifest = parse_manifest(text, yaml=not (_is_json(text) if word == "-" else word.endswith(".json")))
    except ManifestInvalid as error:
        rows = [(fault.path or "(whole)", fault.message) for fault in error.violations]
        raise CommandFailed(f"{word}: INVALID_MANIFEST\n{aligned(('PATH', 'FAULT'), rows, indent=2)}") from None
    return _Side(word, manifest.workflow_id, manifest.compatibility_id, manifest.hash.hex(), "", manifest.canonical)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _registered(caller: Caller, words: list[str], workflow: str) -> dict[str, _Side]:
    """Find definitions by their hashes. Raises WrongUsage, CommandFailed."""
    for word in words:
        if not is_prefix(word):
            raise WrongUsage(f"{word!r} is neither the file of a manifest (.json, .yaml, .yml) nor 8 digits of a hash")
    with caller.connect() as client:
        found: dict[str, list[Definition]] = {word: [] for word in words}
        for definition in client.list_definitions(workflow):
            for word in words:
                if definition.definition_hash.startswith(word.lower()):
                    found[word].append(definition)
        sides = {}
        for word in words:
            one = only_one(word, found[word])
            whole = client.get_definition(one.workflow_id, one.definition_hash)
            sides[word] = _Side(
                word,
                whole.workflow_id,
                whole.compatibility_id,
                whole.definition_hash,
                whole.state.value,
                whole.manifest_json,
            )
    return sides
