"""Fixtures for tests of both halves."""

from tests.openai_spec import validate

__all__ = ["validate"]
