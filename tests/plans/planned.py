"""A statement whose plan is looked at, and what may be wrong with that plan.

It runs as in a batch, in a transaction that is taken back. Three things are counted. Rows of tables; blocks, because an
index that is read from end to end shows up in these alone: 20 for a row (the way down the index, the row, and as much
for each index that it is written into) and 10 for what is looked for in vain; and what the nodes of the plan hand on,
because a loop in a loop touches few rows, many times. Servers prepare their statements, and PostgreSQL may plan such a
one for its parameters or once for all: both plans are looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer

from fencepost_server.store.arrays import Column
from fencepost_server.store.queries import query

_LIMITS = {"lock_timeout": "1000", "statement_timeout": "60000", "idle_timeout": "5000"}
_EXPLAIN = b"explain (analyze, buffers, format json, timing off, costs off) "
_PARAMETER = re.compile(rb"%\((\w+)\)s")
_SMALL = {"cluster", "server"}
_INPUTS = {"Outer", "Inner", "Member", "Subquery"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A statement, its parameters, the indexes that it may use and how many rows it may touch: if it is given columns
    of a batch, ``most`` for 20 rows of them.
    """

    file: str
    statement: str
    params: dict[str, Any]
    indexes: set[str]
    most: int
    lone: bool = False
    """It runs without the settings of a batch."""
    in_order: bool = False
    """With those of lists."""
    scans: frozenset[str] = frozenset()
    """Tables that it may read from end to end."""
    looked_for: int = 20
    """Rows of a batch that it is given."""

    def sizes(self, *sizes: int) -> dict[int, Planned]:
        """The same of so many rows of a batch each; only itself, as 1, if it is given no columns of one."""
        columns = [value for value in self.params.values() if _is_of_a_batch(value)]
        if not columns:
            return {1: self}
        return {n: self._of(n) for n in (min(size, len(columns[0])) for size in sizes)}

    def _of(self, n: int) -> Planned:
        params = {k: type(v)(v[:n]) if _is_of_a_batch(v) else v for k, v in self.params.items()}
        return replace(self, params=params, most=self.most * n // 20, looked_for=n)


def _is_of_a_batch(value: Any) -> bool:
    return isinstance(value, Column) and len(value) >= 100


def faults(connection: psycopg.Connection[Any], planned: Planned, *, generic: bool = False) -> list[str]:
    """What is wrong with a plan. ``generic``: with the one that is made for all parameters."""
    with connection.transaction(force_rollback=True):
        if not planned.lone:
            prelude(connection)
        if planned.in_order:
            connection.execute(query("run", "in_order"))
        top = explained(connection, query(planned.file, planned.statement), planned.params, generic=generic)
    nodes = [node for node in walk(top) if node["Actual Loops"]]  # a generic plan has branches that never run
    used = {node["Index Name"] for node in nodes if "Index Name" in node}
    scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"} - _SMALL - planned.scans
    found = [f"uses {index}" for index in used - planned.indexes] + [f"scans {table}" for table in scanned]
    if not used:
        found.append("uses no index")
    if (rows := touched(nodes)) > planned.most:
        found.append(f"touches {rows} rows")
    blocks = sum(looked_into(node) for node in nodes if "Relation Name" in node)
    if blocks > 20 * rows + 10 * planned.looked_for:
        found.append(f"looks into {blocks} blocks")
    if (passed := passed_on(nodes)) > max(150 * planned.looked_for, 20 * planned.most):
        found.append(f"passes {passed} rows")
    return found


def prelude(connection: psycopg.Connection[Any]) -> None:
    """Begin a transaction as batches do."""
    connection.execute(query("batch", "prelude"), _LIMITS)


def explained(
    connection: psycopg.Connection[Any], statement: bytes, params: dict[str, Any], *, generic: bool = False
) -> dict[str, Any]:
    """The top node of a plan that has run."""
    if generic:
        row = _execute_prepared(connection, statement, params)
    else:
        row = connection.execute(_EXPLAIN + statement, params).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    top: dict[str, Any] = plan[0]["Plan"]
    return top


def _execute_prepared(connection: psycopg.Connection[Any], statement: bytes, params: dict[str, Any]) -> Any:
    names = list(dict.fromkeys(name.decode() for name in _PARAMETER.findall(statement)))
    numbered = _PARAMETER.sub(lambda found: b"$%d" % (names.index(found[1].decode()) + 1), statement).replace(
        b"%%", b"%"
    )
    transformer = Transformer.from_context(connection)
    transformer.dump_sequence([params[name] for name in names], [PyFormat.AUTO] * len(names))  # to learn the types
    prepared = connection.pgconn.prepare(b"planned", numbered, transformer.types or ())
    assert prepared.status == psycopg.pq.ExecStatus.COMMAND_OK, prepared.error_message.decode()
    try:
        connection.execute("set local plan_cache_mode = force_generic_plan")
        given = sql.SQL(", ").join(map(_literal, (params[name] for name in names)))
        call = sql.SQL("execute planned({})" if names else "execute planned").format(given)
        return connection.execute(_EXPLAIN + call.as_string(connection).encode()).fetchone()
    finally:
        connection.execute("deallocate planned")


def _literal(value: Any) -> sql.Composable:
    if isinstance(value, Column):
        return sql.SQL("{}::{}").format(sql.Literal(list(value)), sql.SQL(_ARRAYS[value.array_oid]))
    if isinstance(value, timedelta):
        return sql.SQL("{}::interval").format(sql.Literal(f"{value.total_seconds()} s"))
    return sql.Literal(value)


_ARRAYS = {1016: "int8[]", 1009: "text[]", 1001: "bytea[]", 2951: "uuid[]", 1185: "timestamptz[]", 1000: "bool[]"}


def walk(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's nodes."""
    yield plan
    for child in plan.get("Plans", []):
        yield from walk(child)


def touched(nodes: list[dict[str, Any]]) -> int:
    """Rows of tables that the nodes of a plan have read or written, those included that did not fit."""
    return sum(
        int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
        for node in nodes
        if "Relation Name" in node
    )


def passed_on(nodes: list[dict[str, Any]]) -> int:
    """Rows that came out of the nodes of a plan, those included that did not fit or had no match."""
    left_out = ("Rows Removed by Filter", "Rows Removed by Join Filter")
    return sum(
        int((node["Actual Rows"] + sum(node.get(k, 0) for k in left_out)) * node["Actual Loops"]) for node in nodes
    )


def looked_into(node: dict[str, Any]) -> int:
    """Blocks that a node has looked into by itself; what it took from other nodes is theirs."""
    inputs = (child for child in node.get("Plans", []) if child["Parent Relationship"] in _INPUTS)
    own: int = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
    return own - sum(int(child["Shared Hit Blocks"] + child["Shared Read Blocks"]) for child in inputs)
