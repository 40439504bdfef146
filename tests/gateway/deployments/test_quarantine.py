from __future__ import annotations

from gateway.deployments.quarantine import CONVICTED, SUSPECT_SECONDS, SUSPECTS_MAX, UNTOLD_MAX, Quarantine


def test_two_deaths_convict_and_time_forgets() -> None:
    quarantine = Quarantine()
    quarantine.accuse(7, 1, 0.0)
    assert not quarantine.convicted(7, 1.0)
    quarantine.accuse(7, 1, 1.0)
    assert quarantine.convicted(7, 1.0) and not quarantine.convicted(8, 1.0)
    assert not quarantine.convicted(7, 1.0 + SUSPECT_SECONDS)


def test_what_others_tell_of_the_same_death_counts_once() -> None:
    one, other = Quarantine(), Quarantine()
    for quarantine in (one, other):
        quarantine.accuse(7, 1, 0.0)
    for digest, against in one.tell():
        other.hear(digest, against, 0.1)
    assert not other.convicted(7, 0.1)
    other.accuse(7, 1, 0.2)  # it is there again
    for digest, against in other.tell():
        one.hear(digest, against, 0.3)
    assert one.convicted(7, 0.3) and other.convicted(7, 0.3)
    assert one.tell() == (), "what was heard is not told on"


def test_who_is_answered_to_the_end_is_acquitted_everywhere() -> None:
    one, other = Quarantine(), Quarantine()
    one.accuse(7, 1, 0.0)
    for digest, against in one.tell():
        other.hear(digest, against, 0.1)
    other.acquit(7)
    other.acquit(8)  # nobody has accused it
    told = other.tell()
    assert told == ((7, 0),) and not other
    for digest, against in told:
        one.hear(digest, against, 0.2)
    one.accuse(7, 1, 0.3)
    assert not one.convicted(7, 0.3)


def test_they_are_bounded() -> None:
    quarantine = Quarantine()
    for digest in range(2 * SUSPECTS_MAX):
        quarantine.accuse(digest, CONVICTED, 0.0)
    assert len(quarantine) == SUSPECTS_MAX and len(quarantine.tell()) == UNTOLD_MAX
    assert quarantine.convicted(2 * SUSPECTS_MAX - 1, 0.0) and not quarantine.convicted(0, 0.0)
