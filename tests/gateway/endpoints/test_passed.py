"""Bodies that pass to deployments unchanged: forms and JSON, and where the gateway writes the model's name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.endpoints import PASSED_ENDPOINTS
from gateway.endpoints.passed import MAX_PARTS, PassedEndpoint
from gateway.policy import Policy
from gateway.prompts.large_bodies import parse
from gateway.providers.passed import form_body, upstream_path
from tests.gateway.harness import policy_of

ENDPOINT = PassedEndpoint("/v1/audio/transcriptions", "/v1/audio/transcriptions")


def part(name: str, value: bytes, *, boundary: bytes = b"b", more: bytes = b"") -> bytes:
    return b"--%b\r\nContent-Disposition: form-data; name=\"%b\"%b\r\n\r\n%b\r\n" % (
        boundary, name.encode(), more, value
    )  # fmt: skip


@given(st.binary(max_size=200), st.sampled_from([b"b", b"-----x", b"a b", b"'()+_,-./:=?"]))
def test_only_the_models_name_changes(content: bytes, boundary: bytes) -> None:
    if b"\r\n--" + boundary in content:
        return
    file = part("file", content, boundary=boundary, more=b'; filename="model"')
    body = file + part("model", b"ours", boundary=boundary) + file + b"--" + boundary + b"--\r\n"
    parsed = parse(ENDPOINT, body)
    assert parsed.common.model == "ours" and parsed.passed is not None and parsed.passed.form is not None
    assert form_body(parsed.passed.form, "theirs") == body.replace(b"\r\n\r\nours\r\n", b"\r\n\r\ntheirs\r\n")
    assert parsed.passed.content_type == f'multipart/form-data; boundary="{boundary.decode()}"'


@pytest.mark.parametrize(
    "body",
    [
        b"--b\r\n",
        part("file", b"x") + b"--b--\r\n",
        part("model", b"") + b"--b--\r\n",
        part("model", b"m") + part("model", b"n") + b"--b--\r\n",
        part("model", b"m" * 2000) + b"--b--\r\n",
        part("model", b"\xff") + b"--b--\r\n",
        part("model", b"m"),
        part("x", b"y") * (MAX_PARTS + 1) + part("model", b"m") + b"--b--\r\n",
        b"--" + b"b" * 71 + b"\r\n",
    ],
)
def test_a_form_that_names_no_model_is_rejected(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(ENDPOINT, body)


@given(st.lists(st.sampled_from([b"--b", b"\r\n", b"\r\n--b", b"--", b'name="model"', b"content-disposition: ", b"m"])))
def test_no_form_crashes_the_reader(pieces: list[bytes]) -> None:
    body = b"--b\r\n" + b"".join(pieces)
    try:
        parsed = parse(ENDPOINT, body)
    except BadRequest:
        return
    assert parsed.passed is not None and parsed.passed.form is not None
    assert form_body(parsed.passed.form, parsed.common.model) == body


def test_equal_forms_are_equal_requests() -> None:
    bodies = [part("model", b"m") + part("file", content) + b"--b--\r\n" for content in (b"1", b"2", b"1")]
    one, two, three = (parse(ENDPOINT, body).fields["form"] for body in bodies)
    assert one == three != two


@pytest.mark.parametrize(
    ("base_path", "client_path", "path"),
    [
        (b"/v1", "/v1/rerank", b"/v1/rerank"),
        (b"/v1", "/tokenize", b"/tokenize"),
        (b"/site/v1", "/v2/rerank", b"/site/v2/rerank"),
        (b"/openai", "/v1/score", b"/openai/score"),
        (b"", "/v1/score", b"/score"),
    ],
)
def test_paths_are_below_the_servers_root(base_path: bytes, client_path: str, path: bytes) -> None:
    endpoint = next(each for each in PASSED_ENDPOINTS if each.client_path == client_path)
    passed = endpoint.read({}, b'{"model": "m"}').passed
    assert passed is not None and upstream_path(base_path, passed) == path


@pytest.mark.parametrize("path", ["v1/ocr", "/v1/ocr?x=1", "/v1//ocr", "/v1/../admin", "/v1/files", "/v1/chat/x", "/"])
def test_the_policy_lists_only_paths_that_the_gateway_does_not_serve(path: str) -> None:
    with pytest.raises(ValueError, match=r"passthrough"):
        Policy.model_validate(policy_of(passthrough=[path]))
