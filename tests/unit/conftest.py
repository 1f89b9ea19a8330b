"""Hypothesis for the unit tests: no deadline, because the machine may be busy with other tests.

A test takes the settings that are in force when its module is imported: this is loaded before all of them.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
