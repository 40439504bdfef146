"""Command-line options of `python -m backend`, listed by `--help` and in docs/reference/cli.md.

The engine chooses a value for every option that is not given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from backend import parsers
from backend.engine.speculation import DRAFTERS
from backend.kv_cache import KV_FORMATS
from backend.quantization import QUANTIZATIONS

DEMO = "demo"  # stands for the bundled model
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
LOG_LEVELS = ("debug", "info", "warning", "error")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m backend",
        description="Serve a model with the bundled paged-KV engine over an OpenAI-compatible API.",
        epilog="Example: python -m backend --model demo --port 8000",
    )
    _add_what_is_served(made)
    _add_weights(made)
    _add_cache(made)
    _add_steps(made)
    _add_formats(made)
    _add_process(made)
    return made


def _add_what_is_served(made: argparse.ArgumentParser) -> None:
    """Which model, under which name, and where."""
    add = made.add_argument
    add("--model", required=True, help=f"a model directory, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or `{DEMO}`")
    add("--served-model-name", metavar="NAME", help="what clients call it (default: the directory's name or hub id)")
    add("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="0 takes a free one; the ready line names it (default: %(default)s)")


def _add_weights(made: argparse.ArgumentParser) -> None:
    """How they are held, and how long a context is."""
    add = made.add_argument
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto, the default: as saved")
    add("--device", default="auto", help="cpu, cuda or cuda:N; auto, the default: a GPU if there is one")
    add(
        "--quantization",
        choices=tuple(QUANTIZATIONS),
        default="none",
        help="how weights are held: made on load, from a checkpoint of any dtype; fp8 is for Hopper (default: none)",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="decode steps kernel by kernel: slower, and takes less memory",
    )
    add("--max-model-len", type=_positive, metavar="TOKENS", help="longest prompt and answer (default: the model's)")


def _add_cache(made: argparse.ArgumentParser) -> None:
    """How large the KV cache is, and in which form."""
    add = made.add_argument
    memory = made.add_mutually_exclusive_group()
    memory.add_argument("--num-blocks", type=_positive, metavar="N", help="size of the KV cache, in blocks")
    memory.add_argument("--kv-cache-memory-mib", type=_positive, metavar="MIB", help="size of the KV cache, in MiB")
    add(
        "--kv-cache-dtype", choices=tuple(KV_FORMATS), help="auto, the default: the model's; the others take half of it"
    )
    add("--kv-host-bytes", type=_positive, metavar="N", help="host memory for blocks that the KV cache has no room for")
    add("--kv-host-dir", type=Path, metavar="DIR", help="hold those in a file here instead of RAM")
    add("--block-size", type=_positive, metavar="TOKENS", help="tokens in a KV block (default: the engine's)")


def _add_steps(made: argparse.ArgumentParser) -> None:
    """What a step of the engine takes on."""
    add = made.add_argument
    add("--max-num-seqs", type=_positive, metavar="N", help="sequences that run together (default: the engine's)")
    add("--max-num-batched-tokens", type=_positive, metavar="N", help="tokens in one step (default: the engine's)")
    add("--max-waiting", type=_positive, metavar="N", help="requests that may wait; more get 503")
    add(
        "--speculation",
        choices=("none", *DRAFTERS),
        default="none",
        help="guess tokens, so that a step may give several: by n-grams of the text so far, or by a smaller model",
    )
    add("--draft-model", metavar="MODEL", help="the smaller model, of the same vocabulary; as --model")
    add("--max-draft-tokens", type=_positive, metavar="N", help="guesses for one request in a step (default: 8)")
    add("--num-threads", type=_positive, metavar="N", help="threads of a step (default: the engine's choice)")
    add(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse equal prefixes (default: yes)",
    )


def _add_formats(made: argparse.ArgumentParser) -> None:
    """How the model writes what is not text."""
    add = made.add_argument
    formats = (parsers.AUTO, parsers.NONE)
    add(
        "--tool-parser",
        choices=(*formats, *parsers.TOOL_FORMATS),
        default=parsers.AUTO,
        help="how the model writes tool calls; auto, the default: as its chat template does",
    )
    add(
        "--reasoning-parser",
        choices=(*formats, *parsers.REASONING_FORMATS),
        default=parsers.AUTO,
        help="between which markers it reasons; auto, the default: as its chat template does",
    )


def _add_process(made: argparse.ArgumentParser) -> None:
    """When it ends, and what it tells of itself."""
    add = made.add_argument
    add("--drain-seconds", type=_seconds, default=10.0, help="after SIGTERM, time for running replies (default: 10)")
    add(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends: with whoever holds its other end"
    )
    add("--kv-events", metavar="ENDPOINT", help="publish KV events, as vLLM does, on e.g. tcp://127.0.0.1:5557")
    add("--kv-events-replay", metavar="ENDPOINT", help="send missed KV events again to whoever asks here")
    add("--kv-events-topic", default="", metavar="TOPIC", help="the first frame of every batch (default: empty)")
    add(
        "--kv-events-encoding",
        choices=("map", "array"),
        default="map",
        help="array is vLLM's until June 2026 (default: %(default)s)",
    )
    add("--otlp-endpoint", metavar="URL", help=f"send traces to this OTLP/HTTP collector (default: ${OTLP_VARIABLE})")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="default: %(default)s")


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not a port")
    return port


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 3600")
    return value
