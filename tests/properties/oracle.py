"""A second opinion on the rules: registering, starting with keys, and commands on runs, in plain Python without I/O.

Written from the semantics and the contract alone, so that it can disagree with the engine. It does not choose: which
task a worker gets and with which token, and the ids of runs, are told to it, and it says whether they may be.

    oracle = Oracle()
    oracle.register(manifest)
    start = oracle.start("wf", {"a": 1}, now=0.0)
    run = oracle.runs[start.run]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.properties.oracle_model import Answer
from tests.properties.oracle_run import Limits, Run


@dataclass(frozen=True, slots=True)
class Started:
    """The answer to a start; ``run`` is an index in `Oracle.runs`: the run that was made, found, or is in conflict."""

    code: str
    run: int = -1
    created: bool = False
    input_differs: bool = False


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a key stands for: the run, the fingerprint of the request that brought it, and the first answer."""

    fingerprint: str
    answer: Started


class Oracle:
    """Definitions, keys and runs of one namespace."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.runs: list[Run] = []
        self._definitions: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._active: dict[str, str] = {}
        self._request_ids: dict[str, Remembered] = {}
        self._request_keys: dict[tuple[str, str, str], Remembered] = {}
        self._dedupe_keys: dict[tuple[str, str], Remembered] = {}
        self._key_of_run: dict[int, tuple[str, str]] = {}

    def register(self, manifest: Mapping[str, Any]) -> tuple[str, bool]:
        """OK and whether it is new, or DEFINITION_DRIFT."""
        known = self._definitions.setdefault(manifest["id"], {})
        version = manifest["compatibility_id"]
        if version in known:
            return ("OK", False) if known[version] == manifest else ("DEFINITION_DRIFT", False)
        known[version] = manifest
        self._active[manifest["id"]] = version
        return "OK", True

    def start(
        self,
        workflow_id: str,
        data: Any,
        now: float,
        *,
        request_id: str = "",
        request_key: str = "",
        user_id: str = "",
        dedupe_key: str = "",
        bind: bool = False,
        start_delay: float | None = None,
        run_timeout: float | None = None,
    ) -> Started:
        """Start a run, or find the one that a key names."""
        fingerprint = json.dumps([workflow_id, data], sort_keys=True)
        whole = json.dumps([fingerprint, user_id, request_key, dedupe_key, bind, start_delay, run_timeout])
        key, dedupe = (user_id, workflow_id, request_key), (workflow_id, dedupe_key)
        self._free_keys()
        answer = None
        if request_id in self._request_ids:
            return _recall(self._request_ids[request_id], whole, "REQUEST_ID_CONFLICT")
        if request_key and key in self._request_keys:
            answer = _recall(self._request_keys[key], fingerprint, "REQUEST_KEY_CONFLICT")
            answer = replace(answer, created=False)
        elif dedupe_key and dedupe in self._dedupe_keys:
            answer = self._bound(self._dedupe_keys[dedupe], fingerprint, bind)
        elif workflow_id not in self._active:
            answer = Started("UNKNOWN_WORKFLOW")
        else:
            manifest = self._definitions[workflow_id][self._active[workflow_id]]
            answer = Started("OK", len(self.runs), created=True)
            self.runs.append(Run(manifest, data, now, self.limits, start_delay, run_timeout))
            if dedupe_key:
                self._key_of_run[answer.run] = dedupe
                self._dedupe_keys[dedupe] = Remembered(fingerprint, answer)
        if answer.code == "OK":
            if request_id:
                self._request_ids[request_id] = Remembered(whole, answer)
            if request_key:
                self._request_keys.setdefault(key, Remembered(fingerprint, answer))
        return answer

    def _bound(self, holder: Remembered, fingerprint: str, bind: bool) -> Started:
        differs = holder.fingerprint != fingerprint
        if differs and not bind:
            return Started("DEDUPE_KEY_CONFLICT", holder.answer.run)
        return Started("OK", holder.answer.run, input_differs=differs)

    def _free_keys(self) -> None:
        for dedupe, holder in list(self._dedupe_keys.items()):
            if self.runs[holder.answer.run].final:
                del self._dedupe_keys[dedupe]

    def retry(self, run: int, reason: str, skip_undo: bool, now: float) -> Answer:
        """RetryRun; a run that goes on holds its dedupe key again."""
        self._free_keys()
        dedupe = self._key_of_run.get(run)
        taken = dedupe is not None and dedupe in self._dedupe_keys and self._dedupe_keys[dedupe].answer.run != run
        answer = self.runs[run].retry(reason, skip_undo, taken, now)
        if answer.code == "OK" and dedupe is not None:
            fingerprint = json.dumps([dedupe[0], self.runs[run].input.data], sort_keys=True)
            self._dedupe_keys[dedupe] = Remembered(fingerprint, Started("OK", run, created=True))
        return answer

    def pass_time(self, now: float) -> None:
        """Whatever is due happens."""
        for run in self.runs:
            run.pass_time(now)


def _recall(remembered: Remembered, fingerprint: str, conflict: str) -> Started:
    if remembered.fingerprint != fingerprint:
        return Started(conflict, remembered.answer.run)
    return remembered.answer
