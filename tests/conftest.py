"""Fixtures for tests of both halves, and how long Hypothesis may take: as long as it does."""

from hypothesis import HealthCheck, settings

from tests.npm import node_project
from tests.openai_spec import validate

__all__ = ["node_project", "validate"]

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")
