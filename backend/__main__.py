"""`python -m backend`: the engine as an OpenAI-compatible server. The only file here that reads the environment."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import uvloop
import zmq
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from backend import parsers
from backend.engine.async_engine import AsyncEngine
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import EngineError
from backend.engine.speculation import DRAFTERS
from backend.kv_cache import KV_FORMS
from backend.quantization import QUANTIZATIONS
from backend.server.app import create_app
from backend.server.kv_events import KVEventPublisher
from backend.server.listener import Listener, bind, url_of
from backend.server.metrics import Metrics
from backend.server.model import load_model
from backend.server.serving import Serving
from backend.server.tracing import DEFAULT_SERVICE_NAME, Tracer, otlp_tracer

DEMO = "demo"
DEMO_NAME = "warmpath-demo"
DEMO_DIR = Path(__file__).parent / "demo_model" / "weights"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# The same weights once more, as their makers' own programs keep them.
HUB_IGNORED = ["*/*.json", "*/*.safetensors", "consolidated*.safetensors"]
TOKENIZER_THREADS = 2
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SERVICE_NAME_VARIABLE = "OTEL_SERVICE_NAME"
LOG_LEVELS = ("debug", "info", "warning", "error")

USAGE_ERROR = 2
START_ERROR = 1


class StartError(Exception):
    """The server cannot start; the message says why, to the person who typed the command."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Before and after the server's own handling, a signal ends the process as any success would.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    if args.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    try:
        uvloop.run(serve(args))
    except (StartError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return START_ERROR
    return 0


async def serve(args: argparse.Namespace) -> None:
    """Loads the model, binds the port and serves until a signal. Raises StartError and EngineError."""
    try:
        sock = bind(args.host, args.port)
    except OSError as error:
        raise StartError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from error
    with sock:
        serving = load(args)
        closing = asyncio.get_running_loop().create_future()
        ready = f"engine ready on {url_of(sock)} model {serving.model.name}"
        app = create_app(serving, closing)
        await Listener(app, closing, args.drain_seconds, ready, args.log_level).serve([sock])


def load(args: argparse.Namespace) -> Serving:
    """Everything that takes time, with progress on stderr."""
    model_dir, name = resolve_model(args.model)
    kv_events = publisher(args)
    with _progress(f"loading the weights of {name}"):
        loaded = Engine.load(_engine_config(args, model_dir), kv_events)
    config = loaded.config
    # Where the cache is smaller than the context, the cache is the context.
    max_model_len = min(config.max_model_len, config.num_blocks * config.block_size)
    with _progress("loading its tokenizer and chat template"):
        try:
            model = load_model(
                model_dir,
                args.served_model_name or name,
                args.model,
                max_model_len,
                tool_parser=args.tool_parser,
                reasoning_parser=args.reasoning_parser,
            )
        except (OSError, ValueError, KeyError) as error:
            raise StartError(f"cannot load {model_dir}: {error}") from error
    engine = AsyncEngine(loaded)
    endpoint = args.otlp_endpoint or os.environ.get(OTLP_VARIABLE)
    service_name = os.environ.get(SERVICE_NAME_VARIABLE, DEFAULT_SERVICE_NAME)
    return Serving(
        model=model,
        engine=engine,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        metrics=Metrics(engine, model.name, config.block_size),
        tracer=otlp_tracer(endpoint, service_name) if endpoint else Tracer(None),
        executor=ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize"),
        kv_events=kv_events,
    )


def publisher(args: argparse.Namespace) -> KVEventPublisher | None:
    """Of KV events, where they are asked for; says where it is bound. Raises StartError."""
    if args.kv_events is None:
        if args.kv_events_replay is not None:
            raise StartError("--kv-events-replay needs --kv-events")
        return None
    try:
        made = KVEventPublisher(
            args.kv_events, args.kv_events_replay, topic=args.kv_events_topic, encoding=args.kv_events_encoding
        )
    except zmq.ZMQError as error:
        raise StartError(f"cannot publish KV events on {args.kv_events}: {error}") from error
    print(f"kv events on {made.endpoint}, replay on {made.replay_endpoint}", file=sys.stderr, flush=True)
    return made


def resolve_model(model: str) -> tuple[Path, str]:
    """Where a model's files are and what it is called. Raises StartError."""
    if model == DEMO:
        if not (DEMO_DIR / "config.json").exists():
            raise StartError(f"the demo model's weights are not in {DEMO_DIR}")
        return DEMO_DIR, DEMO_NAME
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path, path.stem
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise StartError(
            f"{model} is neither a directory, nor a hub id such as Qwen/Qwen3-0.6B, nor a .gguf file, nor `{DEMO}`"
        )
    try:
        with _progress(f"fetching {model} from the hub"):
            return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED)), model
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartError(
            f"cannot fetch {model} from the hub and it is not in the local cache (is this machine online?): {error}"
        ) from error


def _engine_config(args: argparse.Namespace, model_dir: Path) -> EngineConfig:
    given = {
        "num_blocks": args.num_blocks,
        "kv_cache_memory_bytes": args.kv_cache_memory_mib and args.kv_cache_memory_mib * 2**20,
        "block_size": args.block_size,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
        "max_waiting": args.max_waiting,
        "num_threads": args.num_threads,
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_draft_tokens": args.max_draft_tokens,
        "draft_model_dir": args.draft_model and resolve_model(args.draft_model)[0],
        "kv_host_bytes": args.kv_host_bytes,
        "kv_host_dir": args.kv_host_dir,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return EngineConfig(
        model_dir=model_dir,
        dtype=args.dtype,
        device=args.device,
        enable_prefix_caching=args.prefix_caching,
        quantization=args.quantization,
        enforce_eager=args.enforce_eager,
        speculation=args.speculation,
        **chosen,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m backend",
        description="Serve a model with the bundled paged-KV engine over an OpenAI-compatible API.",
        epilog="Example: python -m backend --model demo --port 8000",
    )
    add = made.add_argument
    add("--model", required=True, help=f"a model directory, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or `{DEMO}`")
    add("--served-model-name", metavar="NAME", help="what clients call it (default: the directory's name or hub id)")
    add("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="0 takes a free one; the ready line names it (default: %(default)s)")
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
    memory = made.add_mutually_exclusive_group()
    memory.add_argument("--num-blocks", type=_positive, metavar="N", help="size of the KV cache, in blocks")
    memory.add_argument("--kv-cache-memory-mib", type=_positive, metavar="MIB", help="size of the KV cache, in MiB")
    add("--kv-cache-dtype", choices=tuple(KV_FORMS), help="auto, the default: the model's; the others take half of it")
    add("--kv-host-bytes", type=_positive, metavar="N", help="host memory for blocks that the KV cache has no room for")
    add("--kv-host-dir", type=Path, metavar="DIR", help="hold those in a file here instead of RAM")
    add("--block-size", type=_positive, metavar="TOKENS", help="tokens in a KV block (default: the engine's)")
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
    return made


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


@contextmanager
def _progress(what: str) -> Iterator[None]:
    start = time.monotonic()
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        print(" failed", file=sys.stderr, flush=True)
        raise
    print(f" {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def _stop_with_stdin() -> None:
    """However the parent ends, killed or not, its end of the pipe is closed."""
    # Not by `sys.stdin`: its lock, held by a thread that reads, makes the interpreter abort when it ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _exit(number: int, frame: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
