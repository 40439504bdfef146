"""A meter event is exported once, whatever Stripe has forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.billing.ledger.stripe_state import REPEAT_SECONDS, NotRepeatable, open_exports


def test_an_event_is_exported_once(tmp_path: Path) -> None:
    file = tmp_path / "state" / "stripe.sqlite"
    with open_exports(file) as exports:
        assert exports.exported(["a", "b"]) == set()
        first = exports.record(["a", "b"], now=0.0)
    with open_exports(file) as exports:
        assert exports.exported(["a", "b", "c"]) == {"a", "b"}
        assert exports.repeat(first, now=REPEAT_SECONDS) == {"a", "b"}
        with pytest.raises(NotRepeatable, match="too old"):
            exports.repeat(first, now=REPEAT_SECONDS + 1)
        with pytest.raises(NotRepeatable, match="no export 9"):
            exports.repeat(9, now=0.0)


def test_an_export_that_fails_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "stripe.sqlite"
    with pytest.raises(OSError), open_exports(file) as exports:
        exports.record(["a"], now=0.0)
        raise OSError("the disk is full")
    with open_exports(file) as exports:
        assert exports.exported(["a"]) == set()
