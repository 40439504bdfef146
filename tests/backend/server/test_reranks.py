"""Embeddings, reranks and scores of models that are made for them, by real servers, compared with transformers."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM

from backend.server.pairs import qwen3_prompt
from tests.backend.server.conftest import MAX_MODEL_LEN, RunningServer, StartServer
from tests.backend.server.pooling_models import SIZE, save_model
from tests.e2e.processes import until

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.e2e

TRUE, FALSE = 300, 301
QUERY = "Where does the brown fox live?"
DOCUMENTS = ["The quick brown fox jumps.", "Hello, world! How are you today?", "naïve café, 東京 and 🙂 " * 30]


@pytest.fixture(scope="module")
def reranker_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = {"true_token_id": TRUE, "false_token_id": FALSE}
    return save_model(tmp_path_factory.mktemp("models") / "reranker", "LogitScore", tokens)


@pytest.fixture(scope="module")
def reranker(start_server: StartServer, reranker_dir: Path) -> Iterator[RunningServer]:
    with start_server("--max-num-seqs", "8", model=str(reranker_dir)) as running:
        yield running


@pytest.fixture(scope="module")
def embedder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "embedder", "Pooling", {"pooling_mode_lasttoken": True})


@pytest.fixture(scope="module")
def embedder(start_server: StartServer, embedder_dir: Path) -> Iterator[RunningServer]:
    with start_server("--hf-overrides", '{"matryoshka_dimensions": [16, 32]}', model=str(embedder_dir)) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return httpx2.post(server.url + path, json={"model": server.model, **body}, headers=headers, timeout=120)


def rerank(server: RunningServer, path: str = "/v1/rerank", **fields: Any) -> Any:
    reply = post(server, path, {"query": QUERY, "documents": DOCUMENTS, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids_of(directory: Path, text: str, *, special: bool = False) -> list[int]:
    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=special).ids)


def expected_scores(directory: Path, documents: list[str], instruction: str | None = None) -> tuple[list[float], int]:
    """The probability of the true token against the false one after the prompt, and the tokens of all prompts."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    scores, num_tokens = [], 0
    for document in documents:
        ids = ids_of(directory, qwen3_prompt(QUERY, document, instruction))
        num_tokens += len(ids)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(torch.softmax(logits[[TRUE, FALSE]], 0)[0].item())
    return scores, num_tokens


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_reranks(reranker: RunningServer, reranker_dir: Path, path: str) -> None:
    scores, num_tokens = expected_scores(reranker_dir, DOCUMENTS)
    reply = rerank(reranker, path)
    results = reply["results"]
    assert [each["index"] for each in results] == sorted(range(3), key=lambda i: -scores[i])
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(scores)[::-1], abs=1e-4)
    assert max(scores) - min(scores) > 0.05, "a model that scores everything alike proves nothing"
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == num_tokens
    assert reply["meta"]["tokens"] == {"input_tokens": num_tokens, "output_tokens": 0}
    texts = [each.get("document") for each in results]
    assert texts == ([None] * 3 if path == "/v2/rerank" else [{"text": DOCUMENTS[each["index"]]} for each in results])


def test_forms_of_requests(reranker: RunningServer, reranker_dir: Path) -> None:
    """Cohere's and Jina's documents as objects, `top_n`, and whether texts come back."""
    whole = rerank(reranker)["results"]
    (first,) = rerank(reranker, documents=[{"text": text, "id": 3} for text in DOCUMENTS], top_n=1)["results"]
    assert first["relevance_score"] == pytest.approx(whole[0]["relevance_score"], abs=1e-6)
    assert len(rerank(reranker, top_n=0)["results"]) == 3
    assert "document" not in rerank(reranker, return_documents=False)["results"][0]
    assert "document" in rerank(reranker, "/v2/rerank", return_documents=True)["results"][0]
    scores, _ = expected_scores(reranker_dir, DOCUMENTS[:1], "Find animals")
    (found,) = rerank(reranker, documents=DOCUMENTS[:1], instruction="Find animals")["results"]
    assert found["relevance_score"] == pytest.approx(scores[0], abs=1e-4)


def test_scores(reranker: RunningServer, reranker_dir: Path) -> None:
    scores, num_tokens = expected_scores(reranker_dir, DOCUMENTS)
    for path, first in (("/score", QUERY), ("/v1/score", [QUERY] * 3)):
        reply = post(reranker, path, {"text_1": first, "text_2": DOCUMENTS}).json()
        assert [each["score"] for each in reply["data"]] == pytest.approx(scores, abs=1e-4)
        assert [each["index"] for each in reply["data"]] == [0, 1, 2]
        assert (reply["object"], reply["usage"]["prompt_tokens"]) == ("list", num_tokens)
    named = {"queries": QUERY, "documents": DOCUMENTS[1], "encoding_format": "float"}
    (one,) = post(reranker, "/score", named).json()["data"]
    assert one["score"] == pytest.approx(scores[1], abs=1e-4)


def test_documents_are_cut_and_the_rest_of_the_prompt_is_kept(reranker: RunningServer, reranker_dir: Path) -> None:
    long, tokens = "The quick brown fox. " * 200, 50
    cut = Tokenizer.from_file(str(reranker_dir / "tokenizer.json")).encode(long, add_special_tokens=False)
    scores, num_tokens = expected_scores(reranker_dir, [long[: cut.offsets[tokens - 1][1]]])
    reply = rerank(reranker, documents=[long], max_tokens_per_doc=tokens)
    assert reply["results"][0]["relevance_score"] == pytest.approx(scores[0], abs=1e-4)
    assert reply["usage"]["prompt_tokens"] == num_tokens
    limited = rerank(reranker, documents=[long], truncate_prompt_tokens=num_tokens)
    assert limited["usage"]["prompt_tokens"] <= num_tokens
    assert num_tokens - limited["usage"]["prompt_tokens"] < 4
    assert rerank(reranker, documents=[long * 50], truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] <= MAX_MODEL_LEN


def test_the_prefix_cache_serves_equal_salts_only(reranker: RunningServer) -> None:
    documents = ["A document of its own. " * 20]
    first, again, other = (rerank(reranker, documents=documents, cache_salt=salt) for salt in ("a", "a", "b"))
    assert "prompt_tokens_details" not in first["usage"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert "prompt_tokens_details" not in other["usage"]
    assert again["results"] == [
        {**each, "relevance_score": pytest.approx(each["relevance_score"], abs=1e-5)} for each in first["results"]
    ]


def test_the_usage_record_has_all_waves(reranker: RunningServer) -> None:
    """More documents than are in the engine at a time. The engine's own counter agrees."""
    before = reranker.metric("vllm:prompt_tokens_total")
    reply = post(reranker, "/rerank", {"query": QUERY, "documents": DOCUMENTS * 23}, **{"x-request-id": "many-waves"})
    usage = reply.json()["usage"]
    assert len(reply.json()["results"]) == 69
    record = httpx2.get(f"{reranker.url}/requests/many-waves").json()["usage"]
    assert record["prompt_tokens"] == usage["prompt_tokens"]
    assert record["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert reranker.metric("vllm:prompt_tokens_total") - before == usage["prompt_tokens"]


def test_a_client_that_leaves(reranker: RunningServer) -> None:
    """What it asked for is aborted, and the record has no more than what was computed."""
    before = reranker.metric("vllm:prompt_tokens_total")
    body = {"query": QUERY, "documents": [f"{i} " + "a long text " * 300 for i in range(200)]}
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(f"{reranker.url}/rerank", json=body, headers={"x-request-id": "left"}, timeout=1)
    until(lambda: reranker.metric("vllm:num_requests_running") == reranker.metric("vllm:num_requests_waiting") == 0)
    until(lambda: reranker.metric("warmpath:num_free_blocks") == 1024)
    reply = httpx2.get(f"{reranker.url}/requests/left")
    recorded = reply.json()["usage"]["prompt_tokens"] if reply.status_code == 200 else 0
    assert recorded == reranker.metric("vllm:prompt_tokens_total") - before < 200 * 600


def expected_vectors(directory: Path, texts: list[str]) -> list[Tensor]:
    model = AutoModel.from_pretrained(directory, dtype=torch.float64)
    with torch.inference_mode():
        return [model(torch.tensor([ids_of(directory, text, special=True)])).last_hidden_state[0, -1] for text in texts]


def test_embeddings_of_the_last_token(embedder: RunningServer, embedder_dir: Path) -> None:
    vectors = expected_vectors(embedder_dir, DOCUMENTS)
    client = embedder.client()
    found = client.embeddings.create(model=embedder.model, input=DOCUMENTS, encoding_format="float")
    shortened = client.embeddings.create(model=embedder.model, input=DOCUMENTS, encoding_format="float", dimensions=16)
    for ours, short, vector in zip(found.data, shortened.data, vectors, strict=True):
        assert ours.embedding == pytest.approx((vector / vector.norm()).tolist(), abs=1e-5)
        assert short.embedding == pytest.approx((vector[:16] / vector[:16].norm()).tolist(), abs=1e-5)
    ids = [ids_of(embedder_dir, text, special=True) for text in DOCUMENTS]
    assert found.usage.prompt_tokens == sum(map(len, ids))
    assert shortened.usage.model_dump()["prompt_tokens_details"]["cached_tokens"] > 100  # of the same texts
    packed = post(embedder, "/v1/embeddings", {"input": ids, "encoding_format": "base64"}).json()["data"][2]
    values = struct.unpack(f"<{SIZE}f", base64.b64decode(packed["embedding"]))
    assert values == pytest.approx(found.data[2].embedding, abs=1e-6)
    assert math.isclose(math.hypot(*values), 1, rel_tol=1e-5)


def test_reranks_by_an_embedding_model_are_cosines(embedder: RunningServer, embedder_dir: Path) -> None:
    query, *documents = expected_vectors(embedder_dir, [QUERY, *DOCUMENTS])
    expected = [torch.cosine_similarity(query, each, dim=0).item() for each in documents]
    reply = rerank(embedder)
    assert [each["index"] for each in reply["results"]] == sorted(range(3), key=lambda i: -expected[i])
    scored = post(embedder, "/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-5)
    texts = [QUERY, *DOCUMENTS]
    assert reply["usage"]["prompt_tokens"] == sum(len(ids_of(embedder_dir, text, special=True)) for text in texts)


LONG = "x " * 9000
RERANK = {"query": "a", "documents": ["b"]}
REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    ("reranker", "/rerank", {"query": "a", "documents": []}, "documents"),
    ("reranker", "/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
    ("reranker", "/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
    ("reranker", "/rerank", {"documents": ["b"]}, "query"),
    ("reranker", "/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]"),
    ("reranker", "/rerank", {**RERANK, "top_n": -1}, "top_n"),
    ("reranker", "/rerank", {**RERANK, "bogus": 1}, "bogus"),
    ("reranker", "/rerank", {**RERANK, "truncate_prompt_tokens": 9000}, "truncate_prompt_tokens"),
    ("reranker", "/rerank", {**RERANK, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ("reranker", "/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
    ("reranker", "/score", {"text_1": "a", "text_2": LONG}, "text_2[0]"),
    ("reranker", "/score", {"text_1": "a"}, "text_2"),
    ("reranker", "/score", {"text_1": "a", "text_2": "b", "documents": "c"}, "documents"),
    ("reranker", "/v1/embeddings", {"input": "a"}, "model"),
    ("reranker", "/v1/completions", {"prompt": "a"}, "model"),
    ("embedder", "/rerank", {**RERANK, "instruction": "x"}, "instruction"),
    ("embedder", "/rerank", {"query": LONG, "documents": ["b"]}, "query"),
    ("embedder", "/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]"),
    ("embedder", "/v1/embeddings", {"input": "a", "dimensions": 48}, "dimensions"),
    ("embedder", "/v1/embeddings", {"input": ["a"] * 2049}, "input"),
]


@pytest.mark.parametrize(("name", "path", "body", "param"), REFUSALS)
def test_refusals_name_the_field(
    request: pytest.FixtureRequest, name: str, path: str, body: dict[str, Any], param: str
) -> None:
    reply = post(request.getfixturevalue(name), path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
