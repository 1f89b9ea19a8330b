"""The list of what a turn of workflow code refuses, and the replacing of it.

Seen are: the functions of time, random, secrets, uuid and os that read clocks or chance, random.Random and
SystemRandom without a seed, starting threads and processes, executors, sockets and name resolution, and what of asyncio
depends on the order of sets or on other threads.

Not seen are, because Python gives no place to put a check: datetime.now() and utcnow(), files, environment variables,
iteration over sets (strings hash differently in each process), id(), locks and queues of threads, extensions that call
the system by themselves, and functions of C modules that were imported by name before the guards were installed
(`from time import time`). `escapes` finds the first and the last of these in a function's own code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import datetime as dt
import dis
import os
import random
import secrets
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fencepost.deterministic import gathering, guard
from fencepost.deterministic.guard import Refused, RefusedWithout, refused_method

_NOW = "use ctx.now()"
_SLEEP = "use `await ctx.sleep(...)`"
_CHANCE = "use ctx.random"
_UUID = "use ctx.uuid4()"
_STEP = "do it in a step, with ctx.run(...)"
_OURS = "use fencepost."

_CLOCKS: tuple[str, ...] = (
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
)
_CLOCKS += ("process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns")
# With so many arguments they read no clock.
_CLOCKS_WITHOUT = {"gmtime": 1, "localtime": 1, "ctime": 1, "asctime": 1, "strftime": 2}

_FUNCTIONS: tuple[tuple[ModuleType, tuple[str, ...], str], ...] = (
    (time, _CLOCKS, _NOW),
    (time, ("sleep",), _SLEEP),
    (uuid, ("uuid1", "uuid4", "uuid6", "uuid7"), _UUID),
    (os, ("urandom", "getrandom"), _CHANCE),
    (os, ("fork", "forkpty", "system", "posix_spawn", "posix_spawnp"), _STEP),
    (secrets, ("choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"), _CHANCE),
    (socket, ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getnameinfo"), _STEP),
    (socket, ("create_connection", "create_server", "socketpair"), _STEP),
    (asyncio, ("run_coroutine_threadsafe", "wrap_future"), _STEP),
    (asyncio.tasks, ("run_coroutine_threadsafe",), _STEP),
    (asyncio.futures, ("wrap_future",), _STEP),
    (asyncio, ("wait",), _OURS + "wait"),
    (asyncio.tasks, ("wait", "_wait"), _OURS + "wait"),
    (asyncio, ("as_completed",), _OURS + "as_completed"),
    (asyncio.tasks, ("as_completed",), _OURS + "as_completed"),
)

_METHODS: tuple[tuple[type, str, str, str], ...] = (
    (random.SystemRandom, "random", "random.SystemRandom", _CHANCE),
    (random.SystemRandom, "getrandbits", "random.SystemRandom", _CHANCE),
    (random.SystemRandom, "randbytes", "random.SystemRandom", _CHANCE),
    (threading.Thread, "start", "starting a thread", _STEP),
    (concurrent.futures.thread.ThreadPoolExecutor, "submit", "an executor", _STEP),
    (subprocess.Popen, "__init__", "starting a process", _STEP),
    (socket.socket, "__init__", "a socket", _STEP),
    (asyncio.TaskGroup, "__aenter__", "asyncio.TaskGroup", _OURS + "TaskGroup"),
)

# Functions as they were: what a module imported by name is recognised by it.
_originals: dict[int, tuple[object, str, str]] = {}


def install() -> None:
    """Replace all that is listed here; called once."""
    for module, names, instead in _FUNCTIONS:
        for name in names:
            if hasattr(module, name):
                _replace(module, name, instead)
    for name, arguments in _CLOCKS_WITHOUT.items():
        original = getattr(time, name)
        setattr(time, name, RefusedWithout(original, f"time.{name}() of now", _NOW, arguments))
    for owner, name, what, instead in _METHODS:
        setattr(owner, name, refused_method(getattr(owner, name), what, instead))
    _replace_shared_random()
    gathering.install()


def _replace(module: ModuleType, name: str, instead: str) -> None:
    original = getattr(module, name)
    what = f"{'asyncio' if module.__name__.startswith('asyncio.') else module.__name__}.{name.removeprefix('_')}"
    _originals[id(original)] = (original, what, instead)
    setattr(module, name, Refused(original, what, instead))


def _replace_shared_random() -> None:
    """Refuse the generator that the random module's functions share, and generators without a seed."""
    shared: random.Random = random._inst  # the functions are its bound methods
    for name, value in list(vars(random).items()):
        if getattr(value, "__self__", None) is shared and name not in {"getstate", "setstate"}:
            _replace(random, name, _CHANCE)
    # Functions that were imported by name, such as randint, still draw from these two.
    for name in ("random", "getrandbits"):
        setattr(shared, name, Refused(getattr(shared, name), f"random.{name}", _CHANCE))
    seed = refused_method(random.Random.seed, "random.Random() without a seed", _CHANCE, _lacks_seed)
    random.Random.seed = seed  # type: ignore[method-assign]  # replacing it is the point


def _lacks_seed(_: random.Random, a: object = None, version: int = 2) -> bool:
    return a is None


def escapes(function: Callable[..., object]) -> list[str]:
    """What the guards cannot see in `function`'s own code, a sentence for each; empty if nothing was found.

    Looks for datetime.now, utcnow and today, and for functions that its module imported by name. A hint for
    who writes it: what the function calls is not looked at.
    """
    guard.install()
    if not isinstance(function, FunctionType):
        return []
    found = [f"{name} is {what}: {instead}" for name, what, instead in _captured(function)]
    for code in _codes(function.__code__):
        found += [f"{name}() reads the clock: {_NOW}" for name in _clock_reads(code, function.__globals__)]
    return list(dict.fromkeys(found))


def _captured(function: FunctionType) -> Iterator[tuple[str, str, str]]:
    named = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in sorted(named):
        original, what, instead = _originals.get(id(function.__globals__.get(name)), (None, "", ""))
        if original is not None:
            yield name, what, instead


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _clock_reads(code: CodeType, namespace: dict[str, Any]) -> Iterator[str]:
    value: object = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            value = namespace.get(instruction.argval)
        elif instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
            name = instruction.argval
            if name in {"now", "utcnow", "today"} and value in {dt.datetime, dt.date}:
                yield f"datetime.{name}" if value is dt.datetime else f"date.{name}"
            value = getattr(value, name, None) if isinstance(value, ModuleType) else None
        elif instruction.opname not in {"CACHE", "PRECALL", "PUSH_NULL"}:
            value = None
