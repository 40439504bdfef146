"""Fixtures for all tests, and the profiles of Hypothesis. By default, runs have the same examples and no deadline."""

from hypothesis import HealthCheck, settings

from tests.npm import node_project
from tests.openai_spec import validate

__all__ = ["node_project", "validate"]

settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("searching"), derandomize=True, database=None)
settings.load_profile("steady")
