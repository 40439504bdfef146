"""The quarantine's strikes: how they are added, shared with peers, cleared and bounded."""

from __future__ import annotations

from gateway.deployments.quarantine import ENTRIES_MAX, ENTRY_SECONDS, STRIKES_TO_BLOCK, UPDATES_MAX, Quarantine


def test_two_crashes_block_a_request_until_its_entry_expires() -> None:
    quarantine = Quarantine()
    quarantine.add_strikes(7, 1, 0.0)
    assert not quarantine.is_blocked(7, 1.0)
    quarantine.add_strikes(7, 1, 1.0)
    assert quarantine.is_blocked(7, 1.0) and not quarantine.is_blocked(8, 1.0)
    assert not quarantine.is_blocked(7, 1.0 + ENTRY_SECONDS)


def test_a_crash_that_two_gateways_report_counts_once() -> None:
    one, other = Quarantine(), Quarantine()
    for quarantine in (one, other):
        quarantine.add_strikes(7, 1, 0.0)
    for digest, against in one.take_updates():
        other.receive(digest, against, 0.1)
    assert not other.is_blocked(7, 0.1)
    other.add_strikes(7, 1, 0.2)  # it is in flight at another crash
    for digest, against in other.take_updates():
        one.receive(digest, against, 0.3)
    assert one.is_blocked(7, 0.3) and other.is_blocked(7, 0.3)
    assert one.take_updates() == (), "updates from peers are not forwarded"


def test_a_request_that_completes_is_cleared_at_all_gateways() -> None:
    one, other = Quarantine(), Quarantine()
    one.add_strikes(7, 1, 0.0)
    for digest, against in one.take_updates():
        other.receive(digest, against, 0.1)
    other.clear(7)
    other.clear(8)  # it has no strikes
    told = other.take_updates()
    assert told == ((7, 0),) and not other
    for digest, against in told:
        one.receive(digest, against, 0.2)
    one.add_strikes(7, 1, 0.3)
    assert not one.is_blocked(7, 0.3)


def test_the_quarantine_is_bounded() -> None:
    quarantine = Quarantine()
    for digest in range(2 * ENTRIES_MAX):
        quarantine.add_strikes(digest, STRIKES_TO_BLOCK, 0.0)
    assert len(quarantine) == ENTRIES_MAX and len(quarantine.take_updates()) == UPDATES_MAX
    assert quarantine.is_blocked(2 * ENTRIES_MAX - 1, 0.0) and not quarantine.is_blocked(0, 0.0)
