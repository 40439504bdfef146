"""Times of the storage contract's tests."""

NOW = 1_800_000_000.0
LEASE_SECONDS = 30.0
PATIENT_SECONDS = 60.0  # these tests must not fail on a busy machine
