"""Fixtures for tests of both halves."""

from tests.npm import node_project
from tests.openai_spec import validate

__all__ = ["node_project", "validate"]
