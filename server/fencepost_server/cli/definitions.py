"""`fencepost definitions register|validate|list|get`: manifests, and what was registered."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.caller import Caller, refusal
from fencepost_server.cli.faults import CommandFailed, WrongUsage
from fencepost_server.cli.output import local, readable_json, show_pairs, show_table, write_json, write_line

if TYPE_CHECKING:
    from fencepost import Client, Definition

SHORT_HASH = 12
SHORTEST_PREFIX = 8

_SUFFIXES = (".json", ".yaml", ".yml")

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE…", help="Manifests: .json, .yaml or .yml; - is standard input.", show_default=False),
]


def register(caller: Caller, files: Files) -> None:
    """Register manifests. The same manifest again changes nothing.

    Every file is tried; the exit code is 1 if one was refused.
    """
    from fencepost import FencepostError
    from fencepost_server.cli.documents import definition_document, error_document

    registered: list[tuple[str, Definition]] = []
    refused: list[tuple[str, str]] = []
    with caller.connect() as client:
        for file in files:
            try:
                definition = client.register_definition(readable(file))
            except UnreadableFile as error:
                refused.append((file, str(error)))
                if caller.json:
                    write_json({"file": file, "error": error.document})
            except FencepostError as error:
                refused.append((file, str(refusal(error, caller))))
                if caller.json:
                    write_json({"file": file, "error": error_document(error)})
            else:
                registered.append((file, definition))
                if caller.json:
                    document = definition_document(definition, listed=True)
                    write_json({"file": file, "created": definition.created, **document})
    if registered and not caller.json:
        rows = [
            (file, d.workflow_id, d.compatibility_id, d.definition_hash[:SHORT_HASH], d.state.value, _new(d))
            for file, d in registered
        ]
        show_table(("FILE", "WORKFLOW", "COMPATIBILITY", "DEFINITION", "STATE", "NEW"), rows)
    if refused:
        text = "\n".join(f"{file}: {fault}" for file, fault in refused)
        raise CommandFailed("" if caller.json else text, bare=caller.json)


def _new(definition: Definition) -> str:
    return "yes" if definition.created else "no, it was registered before"


def validate(caller: Caller, files: Files) -> None:
    """Check manifests, and change nothing.

    Every fault is told with its path; the exit code is 1 if there is one.
    """
    from fencepost_server.cli.documents import violation_document

    rows: list[tuple[str, str, str]] = []
    unreadable: list[str] = []
    with caller.connect() as client:
        for file in files:
            try:
                violations = client.validate_definition(readable(file))
            except UnreadableFile as error:
                unreadable.append(f"{file}: {error}")
                if caller.json:
                    write_json({"file": file, "valid": False, "error": error.document})
                continue
            rows += [(file, violation.path or "(whole)", violation.message) for violation in violations]
            if caller.json:
                faults = [violation_document(violation) for violation in violations]
                write_json({"file": file, "valid": not faults, "violations": faults})
            elif not violations:
                write_line(f"{file}: valid")
    if rows and not caller.json:
        show_table(("FILE", "PATH", "FAULT"), rows, whole=("FILE", "PATH", "FAULT"))
    if unreadable and not caller.json:
        raise CommandFailed("\n".join(unreadable))
    if rows or unreadable:
        raise typer.Exit(1)


class UnreadableFile(Exception):
    """A file can't be read, or is none of a manifest; the message says why, without its name."""

    @property
    def document(self) -> dict[str, Any]:
        """The same for programs, in the shape of a server's refusal."""
        return {"reason": "UNREADABLE_FILE", "message": str(self), "violations": [], "metadata": {}}


def names_file(word: str) -> bool:
    """Whether a word is meant to be the file of a manifest."""
    return word == "-" or Path(word).suffix in _SUFFIXES


def readable(file: str) -> Any:
    """A file as the client takes it: its path, or the text of standard input. Raises UnreadableFile."""
    if file == "-":
        # The line break tells the client that this is a text, not the name of a file.
        return _decoded(sys.stdin.buffer.read()) + "\n"
    path = Path(file)
    if not names_file(file):
        raise UnreadableFile(f"the name of a manifest ends with {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    try:
        _decoded(path.read_bytes())
    except OSError as error:
        raise UnreadableFile(error.strerror) from error
    return path


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"not UTF-8 text (byte {error.start})") from None


def list_(
    caller: Caller,
    workflow: Annotated[str, typer.Option("--workflow", help="Only those of this workflow.", show_default=False)] = "",
) -> None:
    """List definitions by workflow, the newest of each first."""
    from fencepost_server.cli.documents import definition_document

    with caller.connect() as client:
        found = client.list_definitions(workflow)
        if caller.json:
            for definition in found:
                write_json(definition_document(definition, listed=True))
            return
        rows = [
            (d.workflow_id, d.compatibility_id, d.definition_hash[:SHORT_HASH], d.state.value, local(d.create_time))
            for d in found
        ]
    show_table(("WORKFLOW", "COMPATIBILITY", "DEFINITION", "STATE", "REGISTERED"), rows)


def get(
    caller: Caller,
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", show_default=False)],
    definition: Annotated[
        str,
        typer.Option(
            "--definition",
            metavar="HASH",
            help="Its hash, or 8 digits of it. Default: the active one.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Show a definition and its manifest."""
    from fencepost_server.cli.documents import definition_document

    with caller.connect() as client:
        found = client.get_definition(workflow, whole_hash(client, workflow, definition) if definition else "")
    if caller.json:
        write_json(definition_document(found))
        return
    show_pairs(
        [
            ("workflow", found.workflow_id),
            ("compatibility", found.compatibility_id),
            ("definition", found.definition_hash),
            ("state", found.state.value),
            ("registered", local(found.create_time)),
        ]
    )
    write_line("")
    write_line(readable_json(found.manifest_json))


def is_prefix(word: str) -> bool:
    """Whether a word can be the hash of a definition, or its beginning."""
    return re.fullmatch(rf"[0-9a-fA-F]{{{SHORTEST_PREFIX},64}}", word) is not None


def whole_hash(client: Client, workflow: str, word: str) -> str:
    """The hash of the one definition of a workflow that ``word`` is the hash of, or its beginning.

    Raises WrongUsage, CommandFailed.
    """
    if not is_prefix(word):
        raise WrongUsage(f"{word!r} is no hash of a definition, nor the first {SHORTEST_PREFIX} or more digits of one")
    if len(word) == 64:
        return word
    found = [d for d in client.list_definitions(workflow) if d.definition_hash.startswith(word.lower())]
    return only_one(word, found).definition_hash


def only_one(word: str, found: Sequence[Definition]) -> Definition:
    """The definition that was found for a word. Raises CommandFailed unless there is exactly one."""
    if len(found) == 1:
        return found[0]
    if not found:
        raise CommandFailed(f"no definition has a hash that begins with {word}")
    names = "\n".join(f"  {d.definition_hash} {d.workflow_id} {d.compatibility_id}" for d in found)
    raise CommandFailed(f"{word} is the beginning of {len(found)} hashes:\n{names}")
