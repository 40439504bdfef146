"""Command-line options of `python -m backend`. docs/reference/cli.md is generated from them.

Each `_add_*` function adds one group of options. An option without a default is None if the command line omits it. The
engine then chooses the value (`backend/engine/config.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend import parsers
from backend.engine.speculation import DRAFTERS
from backend.kv_cache import KV_FORMATS
from backend.kv_transfer.peers import PeerRule, parse_rule
from backend.quantization import QUANTIZATIONS

DEFAULT_MAX_IMAGES = 16  # of a request
DEMO = "demo"  # the value of --model that selects the bundled model
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
LOG_LEVELS = ("debug", "info", "warning", "error")


def build_parser() -> argparse.ArgumentParser:
    """Returns the command-line parser with all options, in the order in which `--help` lists them."""
    parser = argparse.ArgumentParser(
        prog="python -m backend",
        description="Serve a model with the bundled paged-KV engine over an OpenAI-compatible API.",
        epilog="Example: python -m backend --model demo --port 8000",
    )
    _add_model_and_address(parser)
    _add_weights(parser)
    _add_cache(parser)
    _add_scheduling(parser)
    _add_lora(parser)
    _add_images(parser)
    _add_formats(parser)
    _add_process(parser)
    return parser


def _add_model_and_address(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the model, its name in requests and the listening address."""
    add = parser.add_argument
    add("--model", required=True, help=f"model directory, GGUF file, hub id such as Qwen/Qwen3-0.6B, or `{DEMO}`")
    add(
        "--hf-overrides",
        type=_object,
        default={},
        metavar="JSON",
        help="fields that replace those of config.json: what the model is for, under vLLM's names, for example "
        '{"is_matryoshka": true}',
    )
    add("--served-model-name", metavar="NAME", help="model name in requests (default: the directory name or hub id)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=_port,
        default=8000,
        help="port; 0: any free port, printed in the ready line (default: %(default)s)",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the weights' dtype and quantization, the device and the context length."""
    add = parser.add_argument
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto (default): as saved in the checkpoint",
    )
    add("--device", default="auto", help="cpu, cuda or cuda:N; auto (default): a GPU if there is one")
    add(
        "--tensor-parallel-size",
        type=_positive,
        default=1,
        metavar="N",
        help="divide the model among N GPUs, from --device on, or among N processes on a CPU (default: %(default)s)",
    )
    add(
        "--quantization",
        choices=tuple(QUANTIZATIONS),
        default="none",
        help="quantize weights on load, from a checkpoint of any dtype; fp8 requires Hopper (default: none)",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="do not record decode steps or capture CUDA graphs: slower, less memory",
    )
    add("--max-model-len", type=_positive, metavar="TOKENS", help="maximum prompt plus output (default: the model's)")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the size and format of the KV cache, and for the host tier."""
    add = parser.add_argument
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--num-blocks", type=_positive, metavar="N", help="KV cache size in blocks")
    memory.add_argument("--kv-cache-memory-mib", type=_positive, metavar="MIB", help="KV cache size in MiB")
    add(
        "--kv-cache-dtype",
        choices=tuple(KV_FORMATS),
        help="auto (default): the model's dtype; the others use half the memory",
    )
    add("--kv-host-bytes", type=_positive, metavar="N", help="host memory for blocks evicted from the KV cache")
    add("--kv-host-dir", type=Path, metavar="DIR", help="keep the host tier in a file in this directory instead of RAM")
    add(
        "--kv-transfer",
        action="store_true",
        help="serve blocks of the prefix cache to other engines on POST /kv_blocks, by their hashes",
    )
    add(
        "--kv-transfer-peers",
        nargs="+",
        type=_peer,
        default=[],
        metavar="PEER",
        help="engines from which requests may load blocks (`kv_transfer_params`): HOST, HOST:PORT or a network such as "
        "10.0.0.0/8",
    )
    add(
        "--kv-transfer-seconds",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="longest time that a request waits for blocks of another engine, then it computes them "
        "(default: %(default)s)",
    )
    add("--block-size", type=_positive, metavar="TOKENS", help="tokens per KV block (default: chosen by the engine)")


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    """Adds the options for batch and queue limits, speculative decoding, threads and prefix caching."""
    add = parser.add_argument
    add(
        "--max-num-seqs",
        type=_positive,
        metavar="N",
        help="maximum sequences in the batch (default: chosen by the engine)",
    )
    add(
        "--max-num-batched-tokens",
        type=_positive,
        metavar="N",
        help="maximum tokens per step (default: chosen by the engine)",
    )
    add("--max-waiting", type=_positive, metavar="N", help="maximum queued requests; further ones get 503")
    add(
        "--speculation",
        choices=("none", *DRAFTERS),
        default="none",
        help="speculative decoding: draft tokens from n-grams of the text so far or with a smaller model",
    )
    add("--draft-model", metavar="MODEL", help="draft model with the same vocabulary; same values as --model")
    add(
        "--max-draft-tokens", type=_positive, metavar="N", help="maximum draft tokens per request and step (default: 8)"
    )
    add(
        "--num-threads",
        type=_positive,
        metavar="N",
        help="compute threads (default: measured at the start and again under load)",
    )
    add(
        "--wait-for-kernels",
        action="store_true",
        help="if the CPU's kernels must be compiled, start after that (default: serve with torch meanwhile)",
    )
    add(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV cache of shared prompt prefixes (default: yes)",
    )
    add(
        "--prompt-tokens-details",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="report in `usage` how many prompt tokens were cached (default: yes)",
    )


def _add_lora(parser: argparse.ArgumentParser) -> None:
    """Adds the options for LoRA adapters, named as in vLLM."""
    add = parser.add_argument
    add(
        "--enable-lora",
        action="store_true",
        help="serve LoRA adapters under model names (the default with --lora-modules)",
    )
    add(
        "--lora-modules",
        nargs="+",
        type=_lora_module,
        default=[],
        metavar="NAME=PATH",
        help="adapters to load at the start: directories or hub ids with adapter_config.json and "
        "adapter_model.safetensors",
    )
    add(
        "--max-loras",
        type=_positive,
        metavar="N",
        help="maximum adapters in memory, for which memory is set aside (default: 4, or as many as --lora-modules has)",
    )
    add("--max-lora-rank", type=_positive, default=16, metavar="RANK", help="maximum rank (default: %(default)s)")
    add(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter; a client that can reach them can make "
        "the server read any directory",
    )


def _add_images(parser: argparse.ArgumentParser) -> None:
    """Adds the options for images in prompts, named as in vLLM."""
    add = parser.add_argument
    add(
        "--limit-mm-per-prompt",
        type=_image_limit,
        default=DEFAULT_MAX_IMAGES,
        metavar="JSON",
        help='maximum images of a request, as {"image": N}; 0: the image encoder is not loaded '
        f'(default: {{"image": {DEFAULT_MAX_IMAGES}}})',
    )
    add(
        "--mm-processor-kwargs",
        type=_image_sizes,
        default={},
        metavar="JSON",
        help="`min_pixels` and `max_pixels` to which images are scaled; fewer pixels are fewer tokens "
        "(default: as preprocessor_config.json says)",
    )
    add(
        "--allowed-media-domains",
        nargs="+",
        default=[],
        metavar="HOST",
        help="hosts from which images may be downloaded by URL, or `*`; never from private addresses (default: none)",
    )


def _add_formats(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the formats of tool calls and reasoning in the model's output."""
    add = parser.add_argument
    formats = (parsers.AUTO, parsers.NONE)
    add(
        "--tool-parser",
        choices=(*formats, *parsers.TOOL_FORMATS),
        default=parsers.AUTO,
        help="format of tool calls; auto (default): detect from the chat template",
    )
    add(
        "--reasoning-parser",
        choices=(*formats, *parsers.REASONING_FORMATS),
        default=parsers.AUTO,
        help="format of reasoning; auto (default): detect from the chat template",
    )


def _add_process(parser: argparse.ArgumentParser) -> None:
    """Adds the options for shutdown, KV events, tracing and logging."""
    add = parser.add_argument
    add(
        "--drain-seconds",
        type=_seconds,
        default=10.0,
        help="after SIGTERM, time for responses in progress (default: 10)",
    )
    add(
        "--stop-with-stdin",
        action="store_true",
        help="stop when standard input closes, e.g. when the parent process ends",
    )
    add(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish KV events in vLLM's format on this address, e.g. tcp://127.0.0.1:5557",
    )
    add("--kv-events-replay", metavar="ENDPOINT", help="serve replays of missed KV events on this address")
    add("--kv-events-topic", default="", metavar="TOPIC", help="topic, the first frame of every batch (default: empty)")
    add(
        "--kv-events-encoding",
        choices=("map", "array"),
        default="map",
        help="array: vLLM's format until June 2026 (default: %(default)s)",
    )
    add("--otlp-endpoint", metavar="URL", help=f"send traces to this OTLP/HTTP collector (default: ${OTLP_VARIABLE})")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="log level (default: %(default)s)")


def _lora_module(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise _expected("NAME=PATH", text)
    return name, path


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _expected("a JSON object", text)
    return value


def _image_limit(text: str) -> int:
    value = _object(text)
    limit = value.get("image")
    if value.keys() != {"image"} or not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise _expected('an object such as {"image": 4}', text)
    return limit


def _image_sizes(text: str) -> dict[str, int]:
    sizes = _object(text)
    if not sizes.keys() <= {"min_pixels", "max_pixels"} or not all(type(size) is int for size in sizes.values()):
        raise _expected("an object with the integers `min_pixels` and `max_pixels`", text)
    return sizes


def _peer(text: str) -> PeerRule:
    try:
        return parse_rule(text)
    except ValueError:
        raise _expected("HOST, HOST:PORT or a network", text) from None


def _port(text: str) -> int:
    return int(_number(text, int, "a port number from 0 to 65535", 0, 65535))


def _positive(text: str) -> int:
    return int(_number(text, int, "a positive integer", 1))


def _seconds(text: str) -> float:
    return _number(text, float, "a number of seconds from 0 to 3600", 0, 3600)


def _number(text: str, parse: Callable[[str], float], expected: str, least: float, most: float = float("inf")) -> float:
    """The number in `text`. Raises what argparse prints, because its own message names the converting function."""
    try:
        number = parse(text)
    except ValueError:
        raise _expected(expected, text) from None
    if not least <= number <= most:
        raise _expected(expected, text)
    return number


def _expected(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")
