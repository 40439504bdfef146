import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gateway.batches.lines import PREFIX_BYTES, FileCheck, LineSplitter, prefix_key, read_line, validate_line
from gateway.batches.records import LineError
from gateway.core.errors import BadRequest
from gateway.types import Principal
from tests.contract.test_batch_stores import a_batch
from tests.gateway.calls import a_policy


def raw(**fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps({**line, **fields}).encode()


@given(content=some.binary(max_size=60), cuts=some.lists(some.integers(0, 60)))
def test_lines_do_not_depend_on_how_the_file_is_cut_into_chunks(content: bytes, cuts: list[int]) -> None:
    ends = sorted({0, len(content), *(min(cut, len(content)) for cut in cuts)})
    splitter = LineSplitter(1000)
    found = [line for start, end in itertools.pairwise(ends) for line in splitter.feed(content[start:end])]
    found += splitter.end()
    expected = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    assert [(number, line) for number, _, line in found] == expected
    assert all(content[offset : offset + len(line)] == line for _, offset, line in found)


def test_a_line_that_is_too_long_is_rejected_before_it_is_complete() -> None:
    splitter = LineSplitter(10)
    assert len(list(splitter.feed(b"short\nsho"))) == 1
    with pytest.raises(BadRequest, match="line 2 is longer than 10 bytes"):
        list(splitter.feed(b"rt, and longer"))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b'{"custom_id": 5}', "invalid_json_line"),
        (raw(custom_id=""), "missing_custom_id"),
        (raw(method="GET"), "invalid_method"),
        (raw(url="/v1/files"), "invalid_url"),
        (raw(body=[]), "invalid_request"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(line: bytes, code: str) -> None:
    error = read_line(7, line)
    assert isinstance(error, LineError)
    assert (error.line, error.code) == (7, code)


def test_a_file_reports_several_errors_at_once_and_counts_its_lines() -> None:
    check = FileCheck(max_lines=9, max_line_bytes=1000)
    check.feed(raw() + b"\n\n" + raw() + b"\n{\n")
    with pytest.raises(BadRequest) as rejected:
        check.end()
    assert [error.split(":")[0] for error in rejected.value.message.split("\n")] == ["line 3", "line 4"]
    with pytest.raises(BadRequest, match="line 3: a file may have at most 2 lines"):
        FileCheck(max_lines=2, max_line_bytes=1000).feed(b"\n".join([raw(), raw(), raw(), b""]))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (raw(url="/v1/embeddings"), "mismatched_endpoint"),
        (raw(body={"model": "m", "messages": []}), None),  # rejected by the endpoint when the line is called
        (raw(body={"model": "m", "messages": [{"role": "user"}], "stream": True}), "invalid_request"),
        (raw(body={"model": "x", "messages": [{"role": "user"}]}), "model_not_found"),
        (raw(), None),
    ],
)
def test_a_line_is_validated_for_its_batch(line: bytes, code: str | None) -> None:
    policy = a_policy()
    found = validate_line(1, line, a_batch(), Principal(policy.tenants_by_name["t"], "k"), policy)
    assert (found.error.code if found.error else None) == code


@pytest.mark.parametrize(("stream", "code"), [(True, "invalid_request"), (False, None)])
def test_a_line_that_continues_a_response_cannot_stream_either(stream: bool, code: str | None) -> None:
    body = {"model": "m", "input": "x", "previous_response_id": "resp_1", "stream": stream}
    policy, line = a_policy(), raw(url="/v1/responses", body=body)
    batch = msgspec.structs.replace(a_batch(), endpoint="/v1/responses")
    found = validate_line(1, line, batch, Principal(policy.tenants_by_name["t"], "k"), policy)
    assert (found.error.code if found.error else None) == code


@given(some.integers(0, 6000), some.binary(min_size=1, max_size=9), some.binary(min_size=1, max_size=9))
def test_prompts_with_longer_common_prefixes_share_more_of_the_key(shared: int, one: bytes, other: bytes) -> None:
    keys = [prefix_key([b"x" * shared, tail, b"y" * 6000]) for tail in (one, other)]
    agreed = 0
    end = PREFIX_BYTES
    while end <= shared:
        agreed, end = agreed + 8, end * 2
    assert keys[0][:agreed] == keys[1][:agreed]
    assert all(len(key) <= 8 * 10 for key in keys)
