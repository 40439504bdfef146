from __future__ import annotations

import os
import re
import time

import pytest

from gateway.core.ids import POOL_BYTES, new_event_id, random_bytes


def test_random_bytes_do_not_repeat() -> None:
    taken = [random_bytes(12) for _ in range(5 * POOL_BYTES // 12)]
    assert all(len(each) == 12 for each in taken)
    assert len(set(taken)) == len(taken)


def test_a_forked_process_draws_its_own_bytes() -> None:
    random_bytes(8)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, random_bytes(16))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 16) != random_bytes(16)
    os.close(reader)
    os.close(writer)


def test_event_ids_are_ulids_in_order() -> None:
    ids = [new_event_id() for _ in range(1000)]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch("[0-7][0-9A-HJKMNP-TV-Z]{25}", event_id) for event_id in ids)


def test_event_ids_stay_in_order_if_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_event_id()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert new_event_id() > before
