import io
import json
import logging
from collections.abc import Iterator

import pytest

from gateway.telemetry import CallRecord, Telemetry, configure_logging
from tests.gateway.telemetry.conftest import CANARY


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "gateway", "gateway.access")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def configured(*, json: bool = True, access_log: bool = False, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, json=json, access_log=access_log, stream=stream)
    return stream


def test_a_line_is_one_json_object_with_known_fields_only() -> None:
    stream = configured()
    logging.getLogger("gateway.billing.ledger").warning(
        "a row\nwas late", extra={"call_id": "c1", "status": 200, "api_key": CANARY, "messages": [CANARY]}
    )
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "level": "warning",
        "logger": "gateway.billing.ledger",
        "message": "a row\nwas late",
        "call_id": "c1",
        "status": 200,
    }


@pytest.mark.parametrize("as_json", [True, False])
def test_an_exception_is_located_but_not_quoted(as_json: bool) -> None:
    stream = configured(json=as_json)
    try:
        int(CANARY)  # its message quotes the input
    except ValueError:
        logging.getLogger("gateway.endpoints").exception("a request could not be read", extra={"call_id": "c1"})
    assert CANARY not in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()
    assert "c1" in stream.getvalue()


def test_the_text_format() -> None:
    stream = configured(json=False)
    logging.getLogger("gateway.server.app").info("ready", extra={"policy_hash": "ab12"})
    assert stream.getvalue().endswith(" info gateway.server.app: ready  policy_hash=ab12\n")


def test_levels() -> None:
    stream = configured(level="warning")
    logging.getLogger("gateway.server.app").info("below the level")
    logging.getLogger("httpx2").info("POST http://10.0.0.5/")
    logging.getLogger("httpx2").warning("logged")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["logged"]
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("loud", json=True)


def test_the_access_log_is_off_by_default(record: CallRecord) -> None:
    stream = configured()
    Telemetry().record(record)
    assert stream.getvalue() == ""


def test_an_access_line_has_the_call_s_fields_and_no_private_data(record: CallRecord) -> None:
    stream = configured(access_log=True)
    Telemetry().record(record)
    event = json.loads(stream.getvalue())
    del event["time"]
    assert event == {
        "level": "info",
        "logger": "gateway.access",
        "message": "POST /v1/chat/completions 200",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "call_id": "call-1",
        "event_id": "01K0EVENT",
        "tenant": "dev",
        "key_id": "dev",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": "qwen3",
        "deployment": "b",
        "class": "realtime",
        "outcome": "complete",
        "cache": "miss",
        "duration_ms": 50.4,
        "ttft_ms": 9.01,
        "input_tokens": 120,
        "cached_tokens": 80,
        "output_tokens": 30,
    }
    assert CANARY not in stream.getvalue()
