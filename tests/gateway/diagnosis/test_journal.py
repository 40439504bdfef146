"""The journal: bounded files and memory, and no errors for the caller."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from gateway.diagnosis import DiagnosisJournal, read_summaries
from gateway.diagnosis.prefix_diagnosis import MAX_WAITING
from tests.gateway.diagnosis.test_breaks import STABLE, DiagnosisRig, chat


def rows(folder: Path, count: int, **options: int) -> DiagnosisJournal:
    """A journal with `count` rows of about 1 KB each."""
    rig = DiagnosisRig(folder)
    journal = rig.watcher._journal = DiagnosisJournal(folder, "r", **options)
    for n in range(count):
        rig.call(chat(user=f"conversation {n}"))
    return journal


def test_the_newest_rows_are_kept_in_two_files_of_bounded_size(tmp_path: Path) -> None:
    rows(tmp_path, 40, max_file_bytes=5000)
    files = list(tmp_path.rglob("*.jsonl"))
    assert sorted(file.name for file in files) == ["current.jsonl", "earlier.jsonl"]
    assert all(file.stat().st_size <= 5000 for file in files)
    kept = [row.call_id for row in read_summaries(tmp_path)]
    assert kept == sorted(kept)
    assert 5 <= len(kept) < 20


def test_rows_of_several_gateways_are_read_together(tmp_path: Path) -> None:
    for replica in ("one", "two/2"):
        rig = DiagnosisRig(tmp_path)
        rig.watcher._journal = DiagnosisJournal(tmp_path, replica)
        rig.call(chat())
    assert len(list(read_summaries(tmp_path))) == 2


def test_a_truncated_row_is_skipped(tmp_path: Path) -> None:
    rows(tmp_path, 3).close()
    (file,) = tmp_path.rglob("*.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert len(list(read_summaries(tmp_path))) == 2
    rows(tmp_path, 1)
    assert len(list(read_summaries(tmp_path))) == 3, "what comes behind it is read"


def test_a_disk_error_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        journal = rows(blocked, 3)
    assert journal.rows_lost == 3
    assert len(caplog.records) == 1


def test_few_calls_wait_for_the_thread_and_further_ones_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, may_go_on = DiagnosisRig(tmp_path), threading.Event()
    original = rig.watcher._compare
    monkeypatch.setattr(rig.watcher, "_compare", lambda answered: (may_go_on.wait(10), original(answered)))
    monkeypatch.setattr(rig.watcher, "flush", lambda: None)
    with caplog.at_level(logging.WARNING):
        for n in range(MAX_WAITING + 3):
            rig.call(chat(user=f"conversation {n}"))
    assert rig.watcher.calls_skipped == 3
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the diagnosis cannot keep up"]
    may_go_on.set()
    rig.watcher.close()
    assert len(rig.rows) == MAX_WAITING, "closing waits for all of them"
    assert (rig.watcher._waiting, rig.watcher._waiting_bytes) == (0, 0)


def test_long_prompts_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.diagnosis.prefix_diagnosis.MAX_WAITING_BYTES", len(STABLE) // 2)
    rig = DiagnosisRig(tmp_path)
    rig.call(chat())
    rig.call(chat("Be brief."))
    assert (rig.watcher.calls_skipped, len(rig.rows)) == (1, 1)


def test_a_bug_is_logged_and_later_calls_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DiagnosisRig(tmp_path)
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr("gateway.diagnosis.prefix_diagnosis.parts_of", lambda _: 1 // 0)
        rig.call(chat())
    assert "a call could not be diagnosed" in caplog.text
    rig.call(chat())
    assert (len(rig.rows), rig.watcher._waiting) == (1, 0)


def test_outlines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.diagnosis.prefix_diagnosis.MAX_OUTLINES_BYTES", 20 * len(STABLE))
    rig = DiagnosisRig(tmp_path)
    for n in range(100):
        rig.call(chat(user=f"conversation {n}"))
    watcher = rig.watcher
    assert watcher._bytes <= 20 * len(STABLE)
    assert watcher._bytes == sum(outline.bytes for _, outline in watcher._outlines.values())
    assert len(watcher._latest_with_part) <= 4 * len(watcher._outlines)
    assert set(watcher._latest_with_part.values()) | set(watcher._latest.values()) <= set(watcher._outlines)
