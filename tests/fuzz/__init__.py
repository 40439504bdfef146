"""Fuzzing of a running gateway. Not part of the test suite: `python -m tests.fuzz.endpoints --minutes 5`."""
