from __future__ import annotations

from gateway.deployments.quarantine import ENTRIES_MAX, ENTRY_SECONDS, STRIKES_TO_BLOCK, UPDATES_MAX, Quarantine


def test_two_deaths_convict_and_time_forgets() -> None:
    quarantine = Quarantine()
    quarantine.add_strikes(7, 1, 0.0)
    assert not quarantine.is_blocked(7, 1.0)
    quarantine.add_strikes(7, 1, 1.0)
    assert quarantine.is_blocked(7, 1.0) and not quarantine.is_blocked(8, 1.0)
    assert not quarantine.is_blocked(7, 1.0 + ENTRY_SECONDS)


def test_what_others_tell_of_the_same_death_counts_once() -> None:
    one, other = Quarantine(), Quarantine()
    for quarantine in (one, other):
        quarantine.add_strikes(7, 1, 0.0)
    for digest, against in one.take_updates():
        other.receive(digest, against, 0.1)
    assert not other.is_blocked(7, 0.1)
    other.add_strikes(7, 1, 0.2)  # it is there again
    for digest, against in other.take_updates():
        one.receive(digest, against, 0.3)
    assert one.is_blocked(7, 0.3) and other.is_blocked(7, 0.3)
    assert one.take_updates() == (), "what was heard is not told on"


def test_who_is_answered_to_the_end_is_acquitted_everywhere() -> None:
    one, other = Quarantine(), Quarantine()
    one.add_strikes(7, 1, 0.0)
    for digest, against in one.take_updates():
        other.receive(digest, against, 0.1)
    other.clear(7)
    other.clear(8)  # nobody has accused it
    told = other.take_updates()
    assert told == ((7, 0),) and not other
    for digest, against in told:
        one.receive(digest, against, 0.2)
    one.add_strikes(7, 1, 0.3)
    assert not one.is_blocked(7, 0.3)


def test_they_are_bounded() -> None:
    quarantine = Quarantine()
    for digest in range(2 * ENTRIES_MAX):
        quarantine.add_strikes(digest, STRIKES_TO_BLOCK, 0.0)
    assert len(quarantine) == ENTRIES_MAX and len(quarantine.take_updates()) == UPDATES_MAX
    assert quarantine.is_blocked(2 * ENTRIES_MAX - 1, 0.0) and not quarantine.is_blocked(0, 0.0)
