"""Metrics under vLLM's names and labels (0.32, `vllm/v1/metrics/loggers.py`), and their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer, StartServer

pytestmark = pytest.mark.e2e

PLAIN = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
COUNTERS = (
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
HISTOGRAMS = (
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
)
SPLIT = (
    ("num_requests_waiting_by_reason", "reason", {"capacity", "deferred"}),
    ("prompt_tokens_by_source_total", "source", {"local_compute", "local_cache_hit", "external_kv_transfer"}),
    ("request_success_total", "finished_reason", {"stop", "length", "abort", "error"}),
)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[RunningServer]:
    """A server with two slots and a queue of two, so that it can be full."""
    with start_server("--max-num-seqs", "2", "--max-waiting", "2", "--max-num-batched-tokens", "64") as running:
        yield running


def scrape(server: RunningServer) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_names_and_labels_are_those_that_dashboards_use(server: RunningServer) -> None:
    found = scrape(server)
    suffixes = ("_bucket", "_count", "_sum")
    names = [*PLAIN, *(f"{name}_total" for name in COUNTERS), *(n + suffix for n in HISTOGRAMS for suffix in suffixes)]
    for name in [*names, *(name for name, _, _ in SPLIT)]:
        for sample in found[f"vllm:{name}"]:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny-llama", "0"), name
    for name, label, values in SPLIT:
        assert {sample.labels[label] for sample in found[f"vllm:{name}"]} >= values
    assert found["vllm:cache_config_info"][0].labels.keys() >= {"block_size", "num_gpu_blocks"}


def test_figures_of_completed_requests(server: RunningServer) -> None:
    def total(name: str, **labels: str) -> float:
        samples = scrape(server)[f"vllm:{name}"]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def create(**options: Any) -> Any:
        return server.client(strict=False).completions.create(
            model=server.model, prompt=[7] * 100, temperature=0, max_tokens=5, **options
        )

    before = {name: total(name) for name in ("iteration_tokens_total_sum", "iteration_tokens_total_count")}
    create()
    # Two steps for the prompt, then four for one token each; the fifth token is never computed.
    assert total("iteration_tokens_total_sum") - before["iteration_tokens_total_sum"] == 104
    assert total("iteration_tokens_total_count") - before["iteration_tokens_total_count"] == 6
    assert total("iteration_tokens_total_bucket", le="64.0") == total("iteration_tokens_total_count")
    assert total("iteration_tokens_total_bucket", le="32.0") == total("iteration_tokens_total_count") - 2
    create(n=2)  # both from the cache except four tokens
    assert total("prompt_tokens_total") == 200  # one prompt of two choices, as in `usage`
    assert total("prompt_tokens_cached_total") == total("prompt_tokens_by_source_total", source="local_cache_hit") == 96
    assert total("prompt_tokens_by_source_total", source="local_compute") == 104
    assert total("request_prefill_kv_computed_tokens_sum") == 104
    assert total("request_params_n_sum") == 3
    assert total("request_params_max_tokens_sum") == 10
    assert total("request_max_num_generation_tokens_sum") == 10
    assert total("request_generation_tokens_sum") == 15
    assert total("request_num_preemptions_sum") == 0


def test_rejections_are_counted_and_oversized_requests_are_invalid(server: RunningServer) -> None:
    def post(path: str = "completions", **fields: Any) -> Any:
        return httpx2.post(f"{server.base_url}/{path}", json={"model": server.model, **fields}, timeout=60)

    def rejections() -> float:
        return server.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs")

    never = post(prompt="a", n=5)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    assert post(prompt=["a"] * 5).json()["error"]["param"] == "prompt"
    assert len(post("embeddings", input=["a"] * 9).json()["data"]) == 9
    assert rejections() == 0
    body = {"model": server.model, "prompt": "a", "n": 4, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.base_url}/completions", json=body, timeout=60) as four:
        chunks = four.iter_bytes()  # keep a reference: the stream closes when it is collected
        next(chunks)
        refused = post(prompt="a")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    assert rejections() == 1
