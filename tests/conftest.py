"""Fixtures for tests of both halves, and how Hypothesis draws: what a change must pass is the same each time, and takes
as long as it does.
"""

from hypothesis import HealthCheck, settings

from tests.npm import node_project
from tests.openai_spec import validate

__all__ = ["node_project", "validate"]

settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("searching"), derandomize=True, database=None)
settings.load_profile("steady")
