"""Definitions in memory. They are immutable, so a cached one is as true as the row; which one is active is
always read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from fencepost_server.domain.graph import Graph, broken_graph, compile_graph
from fencepost_server.domain.manifest import ManifestInvalid
from fencepost_server.engine.operations import Start
from fencepost_server.store import batch
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Session

_CACHED = 2000


class Catalog:
    """A bounded cache of compiled definitions by hash, least recently used out first."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[bytes, Graph] = OrderedDict()
        self._registered: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()

    def _compiled(self, hash_: bytes, manifest: str) -> Graph:
        graph = self._graphs.get(hash_)
        if graph is None:
            graph = self._graphs[hash_] = compile_graph(manifest)
            if len(self._graphs) > _CACHED:
                self._graphs.popitem(last=False)
        return graph

    def cached(self, hash_: bytes) -> Graph | None:
        """The definition if it is in memory."""
        graph = self._graphs.get(hash_)
        if graph is not None:
            self._graphs.move_to_end(hash_)
        return graph

    async def graphs(self, session: Session, hashes: Iterable[bytes]) -> dict[bytes, Graph]:
        """Definitions of runs, by hash."""
        found: dict[bytes, Graph] = {}
        missing = []
        for hash_ in hashes:
            graph = self.cached(hash_)
            if graph is None:
                missing.append(hash_)
            else:
                found[hash_] = graph
        if missing:
            manifests = await batch.read_definitions(session, missing)
            for hash_ in missing:
                found[hash_] = self._read(hash_, manifests.get(hash_))
        return found

    def _read(self, hash_: bytes, manifest: str | None) -> Graph:
        """A definition, or what stands for one that can't be had: its runs wait for a person, and no other run does."""
        if manifest is None:
            return broken_graph(hash_, f"definition {hash_.hex()} is not there any more")
        try:
            return self._compiled(hash_, manifest)
        except ManifestInvalid as error:
            return broken_graph(hash_, f"this release can't read definition {hash_.hex()}: {error}")

    async def graph(self, database: Database, hash_: bytes) -> Graph:
        """One definition of a run."""
        if (graph := self.cached(hash_)) is not None:
            return graph
        async with database.transaction() as session:
            return (await self.graphs(session, [hash_]))[hash_]

    async def graphs_for_starts(
        self, session: Session, starts: Collection[Start], active: dict[tuple[str, str], bytes]
    ) -> dict[tuple[str, str, bytes], Graph]:
        """The definitions that starts ask for, as far as they are registered in their namespace."""
        wanted = {
            (start.namespace, start.workflow_id, start.definition_hash or active[start.namespace, start.workflow_id])
            for start in starts
            if (start.namespace, start.workflow_id) in active
        }
        found: dict[tuple[str, str, bytes], Graph] = {}
        for key in wanted:
            if key in self._registered and (graph := self.cached(key[2])) is not None:
                found[key] = graph
        missing = wanted - set(found)
        if missing:
            for key, manifest in (await batch.read_definitions_for_starts(session, missing)).items():
                found[key] = self._read(key[2], manifest)
                self._registered[key] = None
                if len(self._registered) > _CACHED:
                    self._registered.popitem(last=False)
        return found
