"""Servers of the test kit, as its own tests have them."""

from __future__ import annotations

from tests.testing_kit.conftest import env, kit_database, patient_watchdog, start

__all__ = ["env", "kit_database", "patient_watchdog", "start"]
