"""A code workflow that breaks as its input says, by errors that look like the worker's own; see code_program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import psycopg

import fencepost
from fencepost import Retry, StepFailed, WorkflowContext, workflow


class Lost(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


ERRORS: dict[str, Callable[[], BaseException]] = {
    "psycopg": lambda: psycopg.OperationalError("the connection is lost"),
    "grpc": lambda: Lost("not ours"),
    "timeout": lambda: TimeoutError("too late"),
    "os": lambda: ConnectionResetError("reset"),
    "lease": lambda: fencepost.LeaseLost("no lease"),
    "unavailable": lambda: fencepost.Unavailable("nobody there"),
    "cancelled": lambda: asyncio.CancelledError("by itself"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "group": lambda: BaseExceptionGroup("several", [SystemExit(1), TimeoutError()]),
    "recursion": lambda: RecursionError("too deep"),
    "memory": MemoryError,
}


def made(kind: str) -> BaseException:
    return ERRORS[kind]()


def break_(kind: str) -> None:
    raise made(kind)


async def break_async(kind: str) -> None:
    await asyncio.sleep(0)
    raise made(kind)


@workflow("broken", compatibility_id="1")
async def broken(ctx: WorkflowContext, given: dict[str, str]) -> list[str]:
    kind, where = given["kind"], given["where"]
    if where == "function":
        break_(kind)
    if where == "task":
        await asyncio.create_task(break_here(kind))
    if where == "stray":
        return [await ctx.run(leave_behind, kind)]
    codes = []
    for function in (break_, break_async):
        try:
            await ctx.run(function, kind, retry=Retry(max_attempts=1))
        except StepFailed as error:
            codes.append(error.code)
    return codes


async def break_here(kind: str) -> None:
    raise made(kind)


async def leave_behind(kind: str) -> str:
    """Begins a task that breaks, which nobody awaits."""
    task = asyncio.create_task(break_async(kind))
    await asyncio.wait([task])
    return kind
