"""Hypothesis for the domain's tests: no deadline, because the machine may be busy with other tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("domain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("domain")
