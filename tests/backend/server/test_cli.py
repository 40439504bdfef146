"""`python -m backend`: options, model names, and start-up errors, which are one line without a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gguf import GGMLQuantizationType
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # public, but in no `__all__`

from backend.__main__ import DEMO_DIR, HUB_IGNORED, HUB_PATTERNS, StartError, resolve_model
from backend.options import build_parser
from tests.backend.gguf_writer import as_type, tokenizer_fields, write_gguf
from tests.launcher import PYTHON, run_to_end

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer, StartServer


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_to_end([*PYTHON, "backend", "--port", "0", *options], os.environ | environment, Path.cwd(), timeout=120)


def test_a_directory_is_served_under_its_name(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == (tmp_path, tmp_path.name)


def test_a_file_is_served_under_any_name(tmp_path: Path) -> None:
    """Ollama's blobs are named by their digests."""
    path = tmp_path / "sha256-0123abcd"
    path.touch()
    assert resolve_model(str(path)) == (path, "sha256-0123abcd")
    result = run("--model", str(path))
    assert result.returncode == 1
    assert "sha256-0123abcd cannot be read" in result.stderr


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere", "nowhere", "a/b/c"])
def test_a_value_that_is_neither_a_path_nor_a_hub_id_is_rejected(model: str) -> None:
    with pytest.raises(StartError, match="is not a directory, a GGUF file, a hub id"):
        resolve_model(model)


def test_weights_are_downloaded_once_if_a_hub_repository_has_two_copies() -> None:
    wanted = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]
    others = [
        "README.md",
        "consolidated.safetensors",  # in Mistral's repositories
        "consolidated-00001-of-00002.safetensors",
        "original/config.json",  # in gpt-oss's and Llama's repositories
        "original/model--00001-of-00002.safetensors",
        "original/consolidated.00.pth",
        "metal/model.bin",
        "onnx/model.onnx",
        "pytorch_model.bin",
    ]
    chosen = filter_repo_objects([*wanted, *others], allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED)
    assert list(chosen) == wanted


@pytest.mark.e2e
def test_a_hub_id_without_a_network_is_a_clear_error(tmp_path: Path) -> None:
    result = run("--model", "Qwen/Qwen3-0.6B", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 1
    assert "cannot download Qwen/Qwen3-0.6B from the hub" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.e2e
def test_a_directory_without_a_model_and_a_taken_port_are_clear_errors(tmp_path: Path) -> None:
    result = run("--model", str(tmp_path))
    assert result.returncode == 1
    assert "config.json" in result.stderr
    assert "Traceback" not in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--model", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "cannot listen on" in result.stderr


@pytest.mark.e2e
def test_a_draft_model_must_have_the_same_vocabulary(checkpoint: Path) -> None:
    result = run("--model", "demo", "--speculation", "draft_model", "--draft-model", str(checkpoint))
    assert result.returncode == 1
    assert f"the draft model in {checkpoint} has another vocabulary" in result.stderr
    assert "Traceback" not in result.stderr
    result = run("--model", "demo", "--speculation", "draft_model")
    assert result.returncode == 1
    assert "draft_model_dir" in result.stderr


@pytest.mark.e2e
def test_speculation_changes_no_output_and_is_counted(
    checkpoint: Path, server: RunningServer, start_server: StartServer
) -> None:
    def answer(running: RunningServer) -> list[Any]:
        options: dict[str, Any] = {"model": running.model, "prompt": "The quick", "max_tokens": 100, "seed": 1}
        completions = running.client().completions
        return [
            completions.create(temperature=temperature, logprobs=1, extra_body={"ignore_eos": True}, **options)
            .choices[0]
            .text
            for temperature in (0.0, 1.0)
        ]

    expected = answer(server)
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == 0
    for options in (("ngram",), ("draft_model", "--draft-model", str(checkpoint), "--max-draft-tokens", "3")):
        with start_server("--speculation", *options) as guessing:
            assert answer(guessing) == expected
            drafted = guessing.metric("vllm:spec_decode_num_draft_tokens_total")
            accepted = guessing.metric("vllm:spec_decode_num_accepted_tokens_total")
            if options != ("ngram",):
                assert guessing.metric("vllm:spec_decode_num_drafts_total") * 3 >= drafted > 0
                # The draft model is the model itself.
                assert accepted == drafted
                by_place = [
                    guessing.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place))
                    for place in range(3)
                ]
                assert sum(by_place) == accepted


@pytest.mark.e2e
def test_the_demo_model_uses_its_checkpoints_sampling_defaults(start_server: StartServer) -> None:
    assert resolve_model("demo")[1] == "warmpath-demo"
    with start_server("--served-model-name", "org/demo", model="demo") as server:
        assert server.model == server.client().models.retrieve("org/demo").id == "org/demo"
        messages: Any = [{"role": "user", "content": "What is Warmpath?"}]
        responses = [server.client().chat.completions.create(model=server.model, messages=messages) for _ in range(2)]
    assert responses[0].choices[0].message.content
    assert responses[0].choices == responses[1].choices  # greedy by generation_config.json


@pytest.mark.e2e
def test_cached_tokens_are_reported_unless_switched_off(start_server: StartServer) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    for options, reported in ((), True), (("--no-prompt-tokens-details",), False):
        with start_server(*options, model="demo") as server:
            reply = server.client().completions.create(model=server.model, prompt=prompt, max_tokens=1)
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens_details is not None) == reported


@pytest.mark.e2e
def test_a_gguf_file_is_served_with_its_own_vocabulary_and_template(start_server: StartServer, tmp_path: Path) -> None:
    fields = tokenizer_fields(DEMO_DIR, pre="smollm") | {"general.sampling.temp": 0.0}
    path = write_gguf(DEMO_DIR, tmp_path / "demo-q8.gguf", as_type(GGMLQuantizationType.Q8_0), fields)
    messages: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    with start_server(model=str(path)) as server:
        assert server.model == "demo-q8"
        reply = server.client().chat.completions.create(model=server.model, messages=messages)
    assert "42" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.e2e
def test_a_malformed_gguf_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    result = run("--model", str(tmp_path / "m.gguf"))
    assert result.returncode == 1
    assert "m.gguf is not a valid GGUF file: it is truncated" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--model", "m", "--port", "70000"],
        ["--model", "m", "--dtype", "int3"],
        ["--model", "m", "--num-blocks", "0"],
        ["--model", "m", "--num-blocks", "4", "--kv-cache-memory-mib", "4"],
        ["--model", "m", "--drain-seconds", "-1"],
    ],
)
def test_invalid_options_are_rejected(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(options)
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--max-num-seqs", "many", "must be a positive integer, not 'many'"),
        ("--max-num-seqs", "0", "must be a positive integer, not '0'"),
        ("--port", "http", "must be a port number from 0 to 65535, not 'http'"),
        ("--port", "65536", "must be a port number from 0 to 65535, not '65536'"),
        ("--drain-seconds", "nan", "must be a number of seconds from 0 to 3600, not 'nan'"),
        ("--lora-modules", "adapter", "must be NAME=PATH, not 'adapter'"),
        ("--hf-overrides", "[]", "must be a JSON object, not '[]'"),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_expected(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["--model", "m", option, value])
    assert f"argument {option}: {expected}\n" in capsys.readouterr().err


def test_every_option_has_a_help_text() -> None:
    assert all(action.help for action in build_parser()._actions)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv-transfer"], "--kv-transfer"),
        (["--enable-lora"], "max_loras"),
        (["--kv-host-bytes", "1000000"], "kv_host_bytes"),
    ],
    ids=str,
)
def test_options_that_do_not_work_with_tensor_parallelism(options: list[str], named: str) -> None:
    result = run("--model", "demo", "--device", "cpu", "--tensor-parallel-size", "2", *options)
    assert result.returncode == 1
    assert named in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.e2e
def test_a_size_that_does_not_divide_the_model() -> None:
    result = run("--model", "demo", "--device", "cpu", "--tensor-parallel-size", "3")
    assert result.returncode == 1
    assert "tensor_parallel_size 3 does not fit this model: 4 attention heads are not a multiple of it" in result.stderr
