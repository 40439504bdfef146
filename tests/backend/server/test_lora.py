"""LoRA adapters on a real server: model names, loading and unloading, KV events, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.__main__ import START_ERROR, main
from tests.backend.lora_writer import save_adapter
from tests.backend.server.conftest import RunningServer, StartServer
from tests.backend.server.test_kv_events import replay

BLOCK_TOKENS = 16
PROMPT = "The quick brown fox jumps over the lazy dog. Hello, world! How are you today? " * 2
GREEDY = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(model, root / name, seed) for seed, name in enumerate(("first", "second", "third"))}


@pytest.fixture(scope="module")
def server(start_server: StartServer, folders: dict[str, Path]) -> Iterator[RunningServer]:
    with start_server(
        "--lora-modules", f"first={folders['first']}", f"second={folders['second']}", "--max-loras", "3",
        "--allow-runtime-lora-updating", "--kv-events", f"ipc://{folders['first']}/events", "--kv-events-replay",
        f"ipc://{folders['first']}/replay",
    ) as running:  # fmt: skip
        yield running


def post(server: RunningServer, path: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/{path}", json=fields, timeout=60)


def complete(server: RunningServer, model: str, **fields: Any) -> Any:
    reply = post(server, "completions", model=model, **{"prompt": PROMPT} | GREEDY | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_models_name_their_parent_and_root(server: RunningServer, folders: dict[str, Path]) -> None:
    listed = {model["id"]: model for model in httpx2.get(f"{server.base_url}/models").json()["data"]}
    assert [*listed] == [server.model, "first", "second"]
    assert listed[server.model]["parent"] is None
    for name in ("first", "second"):
        assert (listed[name]["parent"], listed[name]["root"]) == (server.model, str(folders[name]))
        assert httpx2.get(f"{server.base_url}/models/{name}").json() == listed[name]
    assert httpx2.get(f"{server.base_url}/models/third").status_code == 404


def test_a_request_selects_an_adapter_by_its_name(server: RunningServer) -> None:
    replies = {name: complete(server, name) for name in (server.model, "first", "second")}
    assert [reply["model"] for reply in replies.values()] == [*replies]
    assert len({tuple(reply["choices"][0]["token_ids"]) for reply in replies.values()}) == 3
    messages = [{"role": "user", "content": PROMPT}]
    chat = post(server, "chat/completions", model="first", messages=messages, max_tokens=3).json()
    assert chat["model"] == "first"
    stream = post(server, "chat/completions", model="second", messages=messages, max_tokens=3, stream=True).text
    assert stream.count('"model":"second"') == stream.count("data: {")
    vectors = [post(server, "embeddings", model=name, input=PROMPT).json() for name in replies]
    assert [vector["model"] for vector in vectors] == [*replies]
    assert len({tuple(vector["data"][0]["embedding"]) for vector in vectors}) == 3
    assert post(server, "completions", model="third", prompt="a").json()["error"]["code"] == "model_not_found"


def test_structured_output_of_an_adapter(server: RunningServer) -> None:
    grammar = {"structured_outputs": {"regex": "(yes|no|maybe), [0-9]{4}"}, "max_tokens": 40}
    texts = {name: complete(server, name, **grammar)["choices"][0]["text"] for name in ("first", "second")}
    assert all(text.partition(", ")[0] in ("yes", "no", "maybe") for text in texts.values())
    assert len({*texts.values()}) == 2


def test_kv_events_name_the_adapter_and_caches_are_apart(server: RunningServer, folders: dict[str, Path]) -> None:
    names = (server.model, "first", "second")
    fields: dict[str, Any] = {"prompt": "Once. " + PROMPT, "cache_salt": "tenant", "max_tokens": 1}
    for name in names:
        assert complete(server, name, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = [complete(server, name, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"] for name in names]
    events = {
        event["lora_name"]: event
        for _, _, batch in replay(f"ipc://{folders['first']}/replay")
        for event in batch[1]
        if event["type"] == "BlockStored" and "tenant" in (event.get("extra_keys") or [[]])[0]
    }
    assert [*events] == [None, "first", "second"]
    assert [event["lora_id"] for event in events.values()] == [None, 1, 2]
    for name, event in events.items():
        keys = [name] if name else []
        assert event["extra_keys"] == [[*keys, "tenant"], *[keys or None] * (len(event["block_hashes"]) - 1)]
        assert event["parent_block_hash"] is None
    hashes = [block_hash for event in events.values() for block_hash in event["block_hashes"]]
    assert len({*hashes}) == len(hashes)
    assert [len(event["block_hashes"]) * BLOCK_TOKENS for event in events.values()] == cached


def test_adapters_are_loaded_and_unloaded(server: RunningServer, folders: dict[str, Path], tmp_path: Path) -> None:
    def load(name: str, path: Path) -> httpx2.Response:
        return post(server, "load_lora_adapter", lora_name=name, lora_path=str(path))

    reply = load("third", folders["third"])
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    tokens = complete(server, "third")["choices"][0]["token_ids"]
    for name, path, param, message in (
        ("third", folders["third"], "lora_name", "already loaded"),
        (server.model, folders["third"], "lora_name", "the name of the model itself"),
        ("", folders["third"], "lora_name", "1 to 256 printable characters"),
        ("fourth", folders["third"], "max_loras", "3 adapters are in memory, and max_loras is 3"),
    ):
        error = load(name, path).json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert message in error["message"]
    reply = post(server, "unload_lora_adapter", lora_name="third")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
    assert post(server, "unload_lora_adapter", lora_name="third").status_code == 404
    assert post(server, "completions", model="third", prompt="a").status_code == 404
    error = load("third", tmp_path).json()["error"]
    assert error["param"] == "lora_path"
    assert "adapter_config.json cannot be read" in error["message"]
    assert load("third", folders["third"]).status_code == 200
    again = complete(server, "third")
    assert again["choices"][0]["token_ids"] == tokens
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # the same adapter finds its blocks again
    assert post(server, "unload_lora_adapter", lora_name="third").status_code == 200
    assert server.metric("vllm:lora_requests_info", max_lora="3", running_lora_adapters="") > 0


def test_a_start_with_a_broken_adapter_names_the_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(checkpoint), "--port", "0", "--num-blocks", "8", "--num-threads", "1"]
    assert main([*options, "--lora-modules", f"broken={tmp_path}"]) == START_ERROR
    assert f"error: {tmp_path}/adapter_config.json cannot be read" in capsys.readouterr().err
