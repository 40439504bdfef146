"""Fixtures for all tests, and the settings of Hypothesis: the same examples in each run, without a time limit."""

from hypothesis import HealthCheck, settings

from tests.npm import node_project
from tests.openai_spec import validate

__all__ = ["node_project", "validate"]

settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("searching"), derandomize=True, database=None)
settings.load_profile("steady")
