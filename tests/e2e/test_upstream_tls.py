"""TLS between the gateway and its deployments, with real certificates of an authority that only this test knows."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.e2e.faults.upstreams import Request, Upstreams, listening
from tests.e2e.processes import Gateway, chat, deployment, gateway, simple_policy, warmpath

pytestmark = pytest.mark.e2e

SERVERS = {"good": "localhost", "elsewhere": "elsewhere.test", "picky": "localhost", "self-signed": "localhost"}


async def answer(request: Request) -> None:
    await request.whole()


def certificates(folder: Path) -> dict[str, ssl.SSLContext]:
    """The servers' contexts. Writes the authority's certificate and a client's to the folder."""
    ours, unknown = trustme.CA(), trustme.CA()
    contexts: dict[str, ssl.SSLContext] = {}
    for name, host in SERVERS.items():
        contexts[name] = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        (unknown if name == "self-signed" else ours).issue_cert(host).configure_cert(contexts[name])
    ours.configure_trust(contexts["picky"])
    contexts["picky"].verify_mode = ssl.CERT_REQUIRED
    ours.cert_pem.write_to_path(str(folder / "ca.pem"))
    mine = ours.issue_cert("gateway.test")
    mine.private_key_and_cert_chain_pem.write_to_path(str(folder / "client.pem"))
    return contexts


def policy_of(upstreams: Upstreams, folder: Path) -> dict[str, Any]:
    """A model for each case. Its name is the server's, and what the gateway knows of it."""
    ca = str(folder / "ca.pem")
    with_client = {"ca": ca, "cert": str(folder / "client.pem")}
    cases: dict[str, dict[str, Any]] = {
        "good": {"tls": {"ca": ca}}, "good by default": {}, "elsewhere": {"tls": {"ca": ca}},
        "self-signed": {"tls": {"ca": ca}}, "picky": {"tls": with_client},
    }  # fmt: skip
    deployments = [
        deployment(case, f"https://localhost:{upstreams.ports[case.split(' ')[0]]}", provider="openai", **fields)
        for case, fields in cases.items()
    ]
    models = [{"name": case, "deployments": [case]} for case in cases]
    models.append({"name": "either", "deployments": ["self-signed"], "fallbacks": ["good"]})
    return simple_policy("", deployments=deployments, models=models)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("tls")
    contexts = certificates(folder)
    with (
        listening(dict.fromkeys(SERVERS, answer), contexts) as upstreams,
        gateway(folder, policy_of(upstreams, folder)) as started,
    ):
        yield started


@pytest.mark.parametrize("model", ["good", "picky", "either"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deployment_whose_authority_the_policy_names(front: Gateway, model: str, stream: bool) -> None:
    reply = front.post("chat/completions", {**chat(stream=stream), "model": model})
    assert reply.status_code == 200 and "59 " in reply.text


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("good by default", "unable to get local issuer certificate"),
        ("self-signed", "unable to get local issuer certificate"),
        ("elsewhere", "Hostname mismatch, certificate is not valid for 'localhost'"),
    ],
)
def test_a_certificate_that_is_not_valid_fails_the_attempt_and_names_the_cause(
    front: Gateway, model: str, why: str
) -> None:
    reply = front.post("chat/completions", {**chat(), "model": model})
    assert reply.status_code == 502
    assert {attempt["outcome"] for attempt in reply.json()["error"]["attempts"]} == {"connect_error"}
    lines = [line for line in front.log.read_text().splitlines() if f'"{model}' in line or f"{model}:" in line]
    assert any("the certificate of localhost:" in line and why.replace('"', "") in line for line in lines), lines


@pytest.mark.slow
def test_missing_files_are_named_before_the_start(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "deployments:\n"
        "  - name: a\n    base_url: https://localhost:1/v1\n    model: m\n"
        "    tls: {ca: absent.pem}\n"
        "models:\n  - {name: m, deployments: [a]}\ntenants:\n  - {name: dev}\n"
    )
    ran = warmpath("serve", "--policy", str(policy), "--port", "0", cwd=tmp_path)
    assert ran.returncode == 1
    assert "5:11: deployments.0.tls.ca: absent.pem: no such file or directory" in ran.stderr
    ran = warmpath("check", str(policy), cwd=tmp_path)
    assert ran.returncode == 0 and "absent.pem: no such file or directory here" in ran.stderr
