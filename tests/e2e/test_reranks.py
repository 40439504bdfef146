"""Embeddings, reranks and scores of the bundled engine through the gateway, by OpenAI's client and in Cohere's form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from tests.backend.server.pooling_models import SIZE, save_model
from tests.e2e.processes import Gateway, Running, Wire, deployment, engine, gateway, simple_policy, tenant, until
from tests.otlp_collector import Collector

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=30)]

PROMPT_TOKENS = "vllm:prompt_tokens_total"
QUERY = "Where does the brown fox live?"
DOCUMENTS = ["The quick brown fox jumps.", "Hello, world! How are you today?", "The lazy dog. " * 20]
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "reranker": ("LogitScore", {"true_token_id": 300, "false_token_id": 301}),
    "embedder": ("Pooling", {"pooling_mode": "lasttoken"}),
}


@dataclass(frozen=True)
class Site:
    gateway: Gateway
    engines: dict[str, Running]

    def rerank(self, path: str, **fields: Any) -> Any:
        """A rerank's reply, checked against its receipt and the engine's own counter."""
        before = self.engines["reranker"].metric(PROMPT_TOKENS)
        body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS, **fields}
        reply = self.gateway.post(f"..{path}", body)
        assert reply.status_code == 200, reply.text
        receipt = self.gateway.receipt(reply.headers["x-request-id"])
        assert self.engines["reranker"].metric(PROMPT_TOKENS) - before == tokens_of(receipt)
        return reply.json()


def tokens_of(receipt: dict[str, Any]) -> int:
    """The tokens of a receipt, which must be exact, and billed at the price's rates."""
    uncached, cached = receipt["input_uncached"], receipt["cache_read"]
    assert receipt["exact"] and not receipt["output"]
    assert Decimal(receipt["cost"]) == (uncached * Decimal("0.10") + cached * Decimal("0.01")) / 1_000_000
    return int(uncached + cached)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("reranks")

    def options(name: str) -> list[str]:
        directory = save_model(folder / name, *MODULES[name])
        return ["--model", str(directory), "--dtype", "float32", "--otlp-endpoint", collector.url]

    with (
        engine(folder / "engine-1", *options("reranker")) as reranker,
        engine(folder / "engine-2", *options("embedder")) as embedder,
    ):
        engines = {"reranker": reranker, "embedder": embedder}
        policy = simple_policy(
            reranker.url,
            deployments=[deployment(name, running.url, model=name) for name, running in engines.items()],
            models=[{"name": name, "deployments": [name]} for name in engines],
            tenants=[tenant("dev"), tenant("other"), tenant("limited", limits={"requests": "1/1h"})],
        )
        with gateway(folder / "gateway", policy, otlp_endpoint=collector.url) as started:
            yield Site(started, engines)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_reranks(site: Site, path: str) -> None:
    reply = site.rerank(path)
    scores = [each["relevance_score"] for each in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in reply["results"]) == [0, 1, 2]
    assert reply["usage"]["prompt_tokens"] == reply["meta"]["tokens"]["input_tokens"] > 100


def test_cohere_s_form(site: Site) -> None:
    """Documents as objects with other members, `top_n`, and no texts in the second version's reply."""
    documents = [{"text": text, "title": "t"} for text in DOCUMENTS]
    (best,) = site.rerank("/v2/rerank", documents=documents, top_n=1, max_tokens_per_doc=4096)["results"]
    assert best.keys() == {"index", "relevance_score"}
    assert best == site.rerank("/v1/rerank", return_documents=False)["results"][0]


def test_scores(site: Site) -> None:
    ranked = {each["index"]: each["relevance_score"] for each in site.rerank("/v1/rerank")["results"]}
    for path in ("../score", "score"):
        reply = site.gateway.post(path, {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS})
        assert [each["score"] for each in reply.json()["data"]] == pytest.approx(
            [ranked[i] for i in range(3)], abs=1e-6
        )
        assert tokens_of(site.gateway.receipt(reply.headers["x-request-id"])) == reply.json()["usage"]["prompt_tokens"]


def test_tenants_do_not_share_the_prefix_cache(site: Site) -> None:
    body = {"model": "reranker", "query": "A query of its own.", "documents": ["A long document. " * 30]}
    first, again, other = (site.gateway.post("rerank", body, name) for name in ("dev", "dev", "other"))
    details = [reply.json()["usage"].get("prompt_tokens_details", {}) for reply in (first, again, other)]
    cached = [each.get("cached_tokens", 0) for each in details]
    assert cached[1] > cached[0] + 50  # of the tenant's earlier requests, only the beginning of the prompt is equal
    assert cached[2] == 0
    assert site.gateway.receipt(again.headers["x-request-id"])["cache_read"] == cached[1]


def test_the_openai_client(site: Site) -> None:
    before = site.engines["embedder"].metric(PROMPT_TOKENS)
    with site.gateway.client() as client:
        reply = client.embeddings.with_raw_response.create(model="embedder", input=DOCUMENTS, encoding_format="float")
    found = reply.parse()
    assert [len(each.embedding) for each in found.data] == [SIZE] * 3
    tokens = tokens_of(site.gateway.receipt(reply.headers["x-request-id"]))
    assert tokens == found.usage.prompt_tokens == site.engines["embedder"].metric(PROMPT_TOKENS) - before


def test_errors_limits_and_keys(site: Site) -> None:
    body = {"model": "reranker", "query": QUERY, "documents": []}
    refused = site.gateway.post("rerank", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    unknown = site.gateway.post("rerank", body, "nobody")
    assert unknown.status_code == 401
    body["documents"] = DOCUMENTS
    assert [site.gateway.post("rerank", body, "limited").status_code for _ in range(2)] == [200, 429]


def test_spans(site: Site, collector: Collector) -> None:
    reply = site.gateway.post("rerank", {"model": "reranker", "query": QUERY, "documents": DOCUMENTS})
    trace = reply.headers["x-trace-id"]

    def names() -> set[str]:
        return {span.name for span in collector.spans if span.trace_id.hex() == trace}

    until(lambda: {"POST /v1/rerank", "route", "engine.request", "engine.prefill"} <= names())


def test_a_client_that_leaves(site: Site) -> None:
    """The engine stops, and the receipt has the tokens that it has computed."""
    running = site.engines["reranker"]
    before = running.metric(PROMPT_TOKENS)
    documents = [f"{i} " + "a long text " * 300 for i in range(300)]
    with Wire(site.gateway, "rerank", {"model": "reranker", "query": QUERY, "documents": documents}) as client:
        until(lambda: running.metric(PROMPT_TOKENS) > before)
        client.leave()
    until(lambda: running.metric("vllm:num_requests_running") + running.metric("vllm:num_requests_waiting") == 0)
    (receipt,) = until(lambda: site.gateway.receipts(outcome="client_gone"))
    assert tokens_of(receipt) == running.metric(PROMPT_TOKENS) - before
