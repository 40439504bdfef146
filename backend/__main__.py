"""Entry point of `python -m backend`: loads a model and serves it over an OpenAI-compatible API.

`main` parses the options. `serve` binds the port first, because a wrong address then fails before a long load. `load`
builds the components: weights, tokenizer, metrics and tracer. Progress is printed to stderr. The ready line, which
scripts wait for, is printed to stdout. This is the only file of the engine that reads environment variables.
"""

from __future__ import annotations

from backend import early_imports  # noqa: F401

# isort: split
import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
import zmq

from backend.engine import config as engine_config
from backend.engine import kernel_swap, kv_memory, thread_tuner
from backend.engine.adapter_store import AdapterStore
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_transfer import BlockTransfer
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import EngineError
from backend.kv_transfer.block_layout import layout_of
from backend.kv_transfer.prefix_loader import PrefixLoader
from backend.model_files.lora_files import CONFIG, WEIGHTS
from backend.models import weights
from backend.native import background, compiler
from backend.options import DEMO, OTLP_VARIABLE, build_parser
from backend.server.adapters import ServedAdapters
from backend.server.app import create_app
from backend.server.components import ServerComponents
from backend.server.http_server import EngineHttpServer, bind, url_of
from backend.server.kv_events import KVEventPublisher
from backend.server.kv_transfer import KvTransfer
from backend.server.kv_transfer_metrics import KvTransferMetrics
from backend.server.metrics import ServerMetrics
from backend.server.model import load_model
from backend.server.tracing import DEFAULT_SERVICE_NAME, Tracer, otlp_tracer

if TYPE_CHECKING:
    from backend.server.images import ImageLoader

DEMO_NAME = "warmpath-demo"
DEMO_DIR = Path(__file__).parent / "demo_model" / "weights"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Repositories can contain a second copy of the weights, in the layout of the publisher's own program. The folders of
# sentence-transformers' modules, such as 1_Pooling, have settings.
HUB_IGNORED = ["[!0-9]*/*.json", "*/*.safetensors", "consolidated*.safetensors"]
DEFAULT_MAX_LORAS = 4
SERVICE_NAME_VARIABLE = "OTEL_SERVICE_NAME"

# Modules whose INFO lines are always printed: the progress of a start, and changes that it makes later.
PROGRESS = (background, compiler, engine_config, kernel_swap, kv_memory, thread_tuner, weights)

START_ERROR = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StartError(Exception):
    """The server cannot start. The message is printed to the person who ran the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal and returns the process's exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for module in PROGRESS:
        logging.getLogger(module.__name__).setLevel(logging.INFO)
    # uvicorn handles signals while it serves. Before and after that, a signal ends the process with status 0.
    for number in STOP_SIGNALS:
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
    """Binds the port, loads the model and serves until a signal. Raises StartError and EngineError."""
    try:
        sock = bind(args.host, args.port)
    except OSError as error:
        raise StartError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from error
    with sock:
        components = load(args)
        closing = asyncio.get_running_loop().create_future()
        ready = f"engine ready on {url_of(sock)} model {components.model.name}"
        app = create_app(components, closing)
        await EngineHttpServer(app, closing, args.drain_seconds, ready, args.log_level).serve([sock])


def load(args: argparse.Namespace) -> ServerComponents:
    """Loads weights and tokenizer and builds the server's components. Prints progress to stderr."""
    model_dir, name = resolve_model(args.model)
    kv_events = open_publisher(args)
    with _progress(f"loading the weights of {name}"):
        loaded = Engine.load(_engine_config(args, model_dir), kv_events)
    config = loaded.config
    print(f"compute threads: {config.num_threads} ({config.num_threads_reason})", file=sys.stderr, flush=True)
    # A sequence cannot be longer than the KV cache, so a small cache limits the context.
    max_model_len = min(config.max_model_len, config.num_blocks * config.block_size)
    with _progress("loading the tokenizer and chat template"):
        try:
            model = load_model(
                model_dir,
                args.served_model_name or name,
                args.model,
                max_model_len,
                tool_parser=args.tool_parser,
                reasoning_parser=args.reasoning_parser,
                hf_overrides=args.hf_overrides,
            )
        except (OSError, ValueError, KeyError) as error:
            raise StartError(f"cannot load {model_dir}: {error}") from error
    engine = AsyncEngine(loaded)
    metrics = ServerMetrics(engine, model.name, config.block_size)
    endpoint = args.otlp_endpoint or os.environ.get(OTLP_VARIABLE)
    service_name = os.environ.get(SERVICE_NAME_VARIABLE, DEFAULT_SERVICE_NAME)
    return ServerComponents(
        model=model,
        engine=engine,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        metrics=metrics,
        tracer=otlp_tracer(endpoint, service_name) if endpoint else Tracer(None),
        kv_events=kv_events,
        prompt_tokens_details=args.prompt_tokens_details,
        adapters=_load_adapters(args, loaded, model.name),
        updates_adapters=args.allow_runtime_lora_updating,
        kv_transfer=_kv_transfer(args, engine, metrics, model.name),
        images=_image_loader(args, loaded),
    )


def _image_loader(args: argparse.Namespace, engine: Engine) -> ImageLoader | None:
    """What loads images of requests. None if the model reads text alone. Raises StartError."""
    if engine.images is None:
        return None
    try:
        images = import_module("backend.server.images")  # only now: other models do not need Pillow
    except ImportError as error:
        raise StartError(
            f"images need the package pillow; without it, add --limit-mm-per-prompt '{{\"image\": 0}}': {error}"
        ) from error
    loader: ImageLoader = images.create_loader(engine.images, args.limit_mm_per_prompt, args.allowed_media_domains)
    return loader


def _kv_transfer(
    args: argparse.Namespace, engine: AsyncEngine, metrics: ServerMetrics, model_name: str
) -> KvTransfer | None:
    """What exchanges KV blocks with other engines. None if no option asks for it. Raises StartError."""
    if not (args.kv_transfer or args.kv_transfer_peers):
        return None
    loaded = engine.engine
    if not loaded.config.enable_prefix_caching:
        raise StartError("--kv-transfer and --kv-transfer-peers require prefix caching")
    blocks = BlockTransfer(loaded.scheduler, loaded.runner.kv)
    layout = layout_of(loaded.config, loaded.runner.kv)
    loader = None
    if args.kv_transfer_peers:
        loader = PrefixLoader(engine, blocks, layout, args.kv_transfer_peers, args.kv_transfer_seconds)
    return KvTransfer(blocks, layout, args.kv_transfer, loader, KvTransferMetrics(metrics.registry, model_name))


def _load_adapters(args: argparse.Namespace, engine: Engine, model_name: str) -> ServedAdapters | None:
    """Loads the adapters of the command line. None if no adapters are served. Raises StartError and AdapterError."""
    if not engine.config.max_loras:
        return None
    adapters = ServedAdapters(AdapterStore(engine.config, engine.runner.model.lora_targets), model_name)
    for name, path in args.lora_modules:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            if not _is_hub_id(path):
                raise StartError(f"--lora-modules: {path} is neither a directory nor a hub id")
            folder = _downloaded(path, [CONFIG, WEIGHTS], [])
        with _progress(f"loading the LoRA adapter {name}"):
            adapters.load(name, folder, path)
    return adapters


def open_publisher(args: argparse.Namespace) -> KVEventPublisher | None:
    """Opens the KV event publisher and prints its addresses. Raises StartError.

    Returns None if `--kv-events` is not set.
    """
    if args.kv_events is None:
        if args.kv_events_replay is not None:
            raise StartError("--kv-events-replay requires --kv-events")
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
    """Returns a model's path and name. Downloads it if `model` is a hub id. Raises StartError.

    `model` is `demo`, a directory, a GGUF file or a hub id.
    """
    if model == DEMO:
        if not (DEMO_DIR / "config.json").exists():
            raise StartError(f"the demo model's weights are missing from {DEMO_DIR}")
        return DEMO_DIR, DEMO_NAME
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file():  # read as GGUF whatever its suffix, because Ollama's GGUF files have none
        return path, path.stem
    if not _is_hub_id(model):
        raise StartError(f"{model} is not a directory, a GGUF file, a hub id such as Qwen/Qwen3-0.6B or `{DEMO}`")
    return _downloaded(model, HUB_PATTERNS, HUB_IGNORED), model


def _is_hub_id(name: str) -> bool:
    return not name.startswith(("/", ".", "~")) and name.count("/") == 1


def _downloaded(model: str, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
    """Downloads a model or adapter from the hub. Raises StartError."""
    hub = import_module("backend.hub")  # only now: it takes a quarter of a second
    try:
        with _progress(f"downloading {model} from the hub"):
            path: Path = hub.download(model, patterns, ignored)
    except hub.DownloadError as error:
        raise StartError(
            f"cannot download {model} from the hub, and it is not in the local cache (is this machine online?): {error}"
        ) from error
    return path


def _engine_config(args: argparse.Namespace, model_dir: Path) -> EngineConfig:
    if args.tensor_parallel_size > 1 and (args.kv_transfer or args.kv_transfer_peers):
        raise StartError("--tensor-parallel-size does not work with --kv-transfer and --kv-transfer-peers")
    uses_lora = args.enable_lora or args.lora_modules or args.allow_runtime_lora_updating
    given = {
        "max_loras": (args.max_loras or max(DEFAULT_MAX_LORAS, len(args.lora_modules))) if uses_lora else None,
        "max_lora_rank": args.max_lora_rank,
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
        "min_image_pixels": args.mm_processor_kwargs.get("min_pixels"),
        "max_image_pixels": args.mm_processor_kwargs.get("max_pixels"),
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
        wait_for_kernels=args.wait_for_kernels,
        tensor_parallel_size=args.tensor_parallel_size,
        hf_overrides=args.hf_overrides,
        reads_images=args.limit_mm_per_prompt > 0,
        **chosen,
    )


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Prints `what` when the block begins, and how long it took when it ends."""
    start = time.monotonic()
    print(f"{what} ...", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        print(f"{what} failed", file=sys.stderr, flush=True)
        raise
    print(f"{what} took {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def _stop_with_stdin() -> None:
    """Sends SIGTERM to this process when standard input is closed.

    The pipe closes whenever the parent process ends, even if the parent is killed.
    """
    # `sys.stdin.read` would keep a lock while it blocks, and the interpreter would then abort at exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _exit(number: int, frame: object) -> None:
    _ignore_signals()
    sys.exit(0)


def _ignore_signals() -> None:
    """The process ends already, and another signal must not interrupt its exit."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    status = main()
    _ignore_signals()
    sys.exit(status)
