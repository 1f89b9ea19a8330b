"""What a driver's error means to the layers above. Nothing of SQL, SQLSTATE or a connection string leaves the store."""

from __future__ import annotations

import psycopg

from fencepost_server.domain.errors import DatabaseUnavailable

# A whole batch is tried again, reading and deciding anew.
RETRY_AT_ONCE = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)

# A row lock was not had in time: the batch goes on without the row.
LOCK_TIMEOUT = psycopg.errors.LockNotAvailable

# A row is there already. After a lost answer it may be the one that the try before was still committing.
ALREADY_THERE = psycopg.errors.UniqueViolation

# The connection or the database is at fault, not the statement. OperationalError covers lost connections,
# shutdowns, time-outs, cancelled statements and lack of resources; a read-only transaction means that this
# primary became a replica.
_AWAY = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.ReadOnlySqlTransaction,
    OSError,
    TimeoutError,
)


def is_away(error: BaseException) -> bool:
    """True if trying later may help: the database is gone, restarting, overloaded or was too slow."""
    return isinstance(error, _AWAY)


def unavailable() -> DatabaseUnavailable:
    """The error to hand up in place of an ``is_away`` one."""
    return DatabaseUnavailable("the database can't be reached or did not answer in time")
