"""LoRA adapters in the engine, compared with transformers, whose weights have the adapter added."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from backend.engine.adapter import Adapter
from backend.engine.adapter_store import AdapterStore
from backend.engine.batch import make_batch
from backend.engine.config import EngineConfig, lora_bytes
from backend.engine.engine import Engine
from backend.engine.errors import AdapterError
from backend.engine.graph_runner import GraphRunner
from backend.engine.graphs import NoCapture
from backend.engine.outputs import TokenLogprob
from backend.engine.plan import ScheduledRequest
from backend.engine.pooling import Pooling
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.native import library
from tests.backend.checkpoints import VOCAB_SIZE, build_model, save
from tests.backend.gguf_writer import as_type, write_gguf
from tests.backend.lora_writer import ATTENTION, merge, save_adapter

ARCHITECTURES = (
    "llama-biased",
    "qwen3",
    "phi3",
    "gemma3",
    "glm",
    "olmo2",
    "granite",
    "mixtral",
    "deepseek-v3",
    "moonlight",
)
PROMPTS = {
    "short": [5, 6, 7],
    "repeating": [11, 12, 13, 14, 15] * 8,
    "long": [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(100)],
}
NUM_TOKENS = 20
TOLERANCE = 2e-4  # of log-probabilities
# Two adapters that differ in everything that an adapter can choose.
FIRST: dict[str, Any] = {"seed": 1}
SECOND: dict[str, Any] = {
    "seed": 2, "kinds": (*ATTENTION[:4], "down_proj"), "r": 3, "lora_alpha": 4, "use_rslora": True,
    "rank_pattern": {"o_proj": 7, "v_proj": 1}, "alpha_pattern": {"down_proj": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The directory of an adapter for a checkpoint; each is made once."""
    made: dict[tuple[str, str], Path] = {}

    def get(name: str, adapter: str) -> Path:
        if (name, adapter) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{adapter}") / adapter
            made[name, adapter] = save_adapter(build_model(name), folder, **{"first": FIRST, "second": SECOND}[adapter])
        return made[name, adapter]

    return get


def load(directory: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "max_loras": 2, "device": "cpu"} | options
    return Engine.load(EngineConfig(model_dir=directory, **given))


def store_of(engine: Engine) -> AdapterStore:
    return AdapterStore(engine.config, engine.runner.model.lora_targets)


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[TokenLogprob]]:
    """The tokens of requests that begin one after the other, so that prompts and decodes share steps."""
    outputs: dict[str, list[TokenLogprob]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.has_unfinished:
        for request in waiting[:2]:
            engine.add(request)
        del waiting[:2]
        for output in engine.step():
            assert output.error is None
            outputs[output.request_id] += output.logprobs
    engine.check_integrity()
    return outputs


def requests_of(adapters: dict[str, Adapter | None], **sampling: Any) -> Iterator[Request]:
    """Every prompt for every adapter, in turns."""
    params = SamplingParams(**{"max_tokens": NUM_TOKENS, "temperature": 0.0, "logprobs": 0} | sampling)
    for prompt_name, prompt in PROMPTS.items():
        for name, adapter in adapters.items():
            yield Request(f"{name} {prompt_name}", prompt, params, adapter=adapter)


def adapters_of(engine: Engine, name: str, folder_of: Callable[[str, str], Path]) -> dict[str, Adapter | None]:
    store = store_of(engine)
    return {"none": None, **{each: store.read(each, folder_of(name, each)) for each in ("first", "second")}}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_and_logprobs_equal_transformers_with_merged_weights(
    name: str, checkpoint_dir: Callable[[str], Path], folder_of: Callable[[str, str], Path]
) -> None:
    """Two adapters and requests without one in one batch: chunked prompts, decodes and steps with both."""
    engine = load(checkpoint_dir(name), max_num_batched_tokens=64)
    adapters = adapters_of(engine, name, folder_of)
    outputs = run(engine, list(requests_of(adapters)))
    for adapter in adapters:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint_dir(name), dtype=torch.float64, experts_implementation="eager"
        )
        if adapter != "none":
            merge(model, folder_of(name, adapter))
        for prompt_name, prompt in PROMPTS.items():
            ours = outputs[f"{adapter} {prompt_name}"]
            tokens = [token.token_id for token in ours]
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)
            assert [token.logprob for token in ours] == pytest.approx(
                expected[range(NUM_TOKENS), tokens].tolist(), rel=0, abs=TOLERANCE
            )
            assert (expected.max(-1).values - expected[range(NUM_TOKENS), tokens]).max() < TOLERANCE
    distinct = {tuple(t.token_id for t in tokens) for tokens in outputs.values()}
    assert len(distinct) == len(outputs), "adapters that change no token prove nothing"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 15, "max_num_batched_tokens": 48},  # too few: requests are preempted
        {"speculation": "ngram"},
        {"ops": "reference", "attention": "sdpa"},
        {"enable_prefix_caching": False, "enforce_eager": True},
        {"speculation": "draft_model"},
        {"max_num_seqs": 8},
    ],
    ids=["default", "preempted", "ngram", "torch", "eager", "draft_model", "graphs"],
)
def test_a_batch_changes_no_token(
    options: dict[str, Any],
    checkpoint_dir: Callable[[str], Path],
    folder_of: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With many requests the engine computes what it computes for each request alone."""
    if "ops" not in options and library.load() is None:
        pytest.skip("there is no compiler here")
    if "max_num_seqs" in options:  # the runner for GPUs, which starts steps without adapters early
        monkeypatch.setattr("backend.engine.engine.create_runner", lambda config: GraphRunner(config, NoCapture()))
    if options.get("speculation") == "draft_model":
        options |= {"draft_model_dir": checkpoint_dir("qwen3")}
    engine = load(checkpoint_dir("qwen3"), **options)
    adapters = adapters_of(engine, "qwen3", folder_of)
    together = list(requests_of(adapters, logprobs=None))
    run(engine, together)
    if "num_blocks" in options:
        assert engine.stats().preemptions_total
    if "speculation" in options:
        assert sum(engine.stats().accepted_tokens_total)
    monkeypatch.undo()
    alone = load(checkpoint_dir("qwen3"), ops=options.get("ops", "auto"), attention=options.get("attention", "auto"))
    for request, expected in zip(together, requests_of(adapters, logprobs=None), strict=True):
        run(alone, [expected])
        assert request.token_ids == expected.token_ids


def test_sampled_tokens_and_embeddings_use_the_adapter(
    checkpoint_dir: Callable[[str], Path], folder_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Compared with an engine whose weights have the adapter added, for the same seeds."""
    engine = load(checkpoint_dir("qwen3"))
    adapter = store_of(engine).read("first", folder_of("qwen3", "first"))
    merged = load(save(merge(build_model("qwen3"), folder_of("qwen3", "first")), tmp_path / "merged"))
    sampled, means = [], []
    for each, used in ((engine, adapter), (merged, None)):
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, top_p=0.9, seed=3)
        request = Request("sampled", PROMPTS["short"], params, adapter=used)
        run(each, [request])
        sampled.append(request.token_ids)
        each.add(Request("mean", PROMPTS["long"], SamplingParams(max_tokens=1), adapter=used, pooling=Pooling.MEAN))
        (output,) = each.step()
        assert output.pooled
        means.append(torch.tensor(output.pooled))
    assert sampled[0] == sampled[1]
    torch.testing.assert_close(*means, rtol=0, atol=1e-4)


def probabilities(engine: Engine, *adapters: Adapter | None) -> torch.Tensor:
    """The distribution of the token after the long prompt for each adapter, computed in one step."""
    plan = []
    num_blocks = -(-len(PROMPTS["long"]) // engine.config.block_size)
    for i, adapter in enumerate(adapters):
        request = Request(f"{i}", PROMPTS["long"], SamplingParams(max_tokens=1), adapter=adapter)
        request.block_table = [*range(i * num_blocks, (i + 1) * num_blocks)]
        plan.append(ScheduledRequest(request, 0, len(request.token_ids)))
    model = engine.runner.model
    with torch.inference_mode():
        return model.logits(model.forward(make_batch(plan, engine.config.block_size, engine.config.device))).softmax(-1)


@pytest.mark.parametrize("form", ["int8", "q8_0"])
def test_quantized_models_get_the_same_adapter(
    form: str, checkpoint_dir: Callable[[str], Path], folder_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """In bfloat16. An adapter of zeros gives the model's own distribution, and a real one the merged model's."""
    save_adapter(build_model("llama"), tmp_path / "zeros", seed=0)
    weights = tmp_path / "zeros/adapter_model.safetensors"
    save_file({name: tensor * ("lora_A" in name) for name, tensor in load_file(weights).items()}, weights)

    def engine_of(directory: Path) -> Engine:
        if not form.startswith("q"):
            return load(directory, dtype="bfloat16", quantization=form)
        kind = GGMLQuantizationType[form.upper()]
        return load(write_gguf(directory, tmp_path / f"{directory.name}.gguf", as_type(kind)), dtype="bfloat16")

    plain = save(build_model("llama"), tmp_path / "plain")
    merged = save(merge(build_model("llama"), folder_of("llama", "first")), tmp_path / "merged")
    engine = engine_of(plain)
    store = store_of(engine)
    zeros, first = store.read("zeros", tmp_path / "zeros"), store.read("first", folder_of("llama", "first"))
    alone = probabilities(engine, None)
    none, same, changed = probabilities(engine, None, zeros, first)
    # The merged weights are rounded to the format, and here the adapter is not: the results are only close.
    expected = probabilities(engine_of(merged), None)[0]
    assert (none - alone[0]).abs().max() < 0.06
    assert (same - alone[0]).abs().max() < 0.06
    assert (changed - expected).abs().sum() < 0.3
    assert (changed - alone[0]).abs().sum() > 1.0


def hashes_of(engine: Engine, adapter: Adapter | None, salt: str = "") -> list[bytes]:
    request = Request("r", PROMPTS["long"], SamplingParams(max_tokens=1), adapter=adapter, cache_salt=salt)
    run(engine, [request])
    return request.block_hashes


def test_the_prefix_cache_keeps_adapters_apart(
    checkpoint_dir: Callable[[str], Path], folder_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    engine = load(checkpoint_dir("qwen3"))
    adapters = adapters_of(engine, "qwen3", folder_of)
    adapters["renamed"] = store_of(engine).read("renamed", folder_of("qwen3", "first"))
    changed = save_adapter(build_model("qwen3"), tmp_path / "changed", **FIRST | {"lora_alpha": 13})
    adapters["changed"] = store_of(engine).read("first", changed)
    seen: set[bytes] = set()
    for adapter in adapters.values():
        hashes = hashes_of(engine, adapter)
        assert seen.isdisjoint(hashes)
        seen |= {*hashes}
    assert engine.stats().prefix_cache_hits_total == 0
    # A salt is any text that a client chooses: not even one with an adapter's hash finds its blocks.
    first = adapters["first"]
    assert first is not None
    for salt in (first.name, first.root_hash.decode("latin-1")):
        assert seen.isdisjoint(hashes_of(engine, None, salt))
    assert engine.stats().prefix_cache_hits_total == 0
    again = store_of(engine).read("first", folder_of("qwen3", "first"))
    assert {*hashes_of(engine, again)} < seen
    assert engine.stats().prefix_cache_hits_total == 96


def test_the_number_of_adapters_is_bounded(
    checkpoint_dir: Callable[[str], Path], folder_of: Callable[[str, str], Path]
) -> None:
    """An unloaded adapter counts until its last request has ended."""
    engine = load(checkpoint_dir("qwen3"))
    store = store_of(engine)
    for name in ("a", "b"):
        store.add(store.read(name, folder_of("qwen3", "first")))
    with pytest.raises(AdapterError, match="2 adapters are in memory, and max_loras is 2"):
        store.add(store.read("c", folder_of("qwen3", "second")))
    request = Request("r", [1, 2], SamplingParams(max_tokens=3, temperature=0.0), adapter=store.get("a"))
    engine.add(request)
    engine.step()
    assert engine.stats().running_adapters == {"a"}
    assert store.remove("a") is not None
    assert store.remove("a") is None
    with pytest.raises(AdapterError, match="1 of them unloaded but still used by requests"):
        store.check_new("c")
    while engine.has_unfinished:
        engine.step()
    assert request.num_output_tokens == 3
    store.check_new("c")
    with pytest.raises(AdapterError, match="an adapter named 'b' is already loaded"):
        store.check_new("b")


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3", "moonlight"])
def test_the_memory_of_an_adapter_is_known(
    name: str, checkpoint_dir: Callable[[str], Path], folder_of: Callable[[str, str], Path]
) -> None:
    engine = load(checkpoint_dir(name))
    adapter = store_of(engine).read("first", folder_of(name, "first"))
    tensors = [matrix for parts in adapter.parts.values() for part in parts for matrix in (part.a, part.b)]
    assert sum(tensor.nbytes for tensor in tensors) == lora_bytes(engine.config.model, 4, 4)


def test_memory_for_adapters_is_set_aside(
    checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(checkpoint_dir("qwen3"))
    monkeypatch.setattr("backend.engine.config.free_memory_bytes", lambda device: 1 << 24)
    config: dict[str, Any] = {"model_dir": checkpoint_dir("qwen3"), "device": "cpu", "num_threads": 1}
    plain, with_loras = (EngineConfig(**config, max_lora_rank=64, max_loras=n).resolve().num_blocks for n in (0, 8))
    block_bytes = 16 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head_dim, float32
    expected = 8 * lora_bytes(engine.config.model, 64, 4) / 2 / block_bytes  # half of what is free is for the cache
    assert plain - with_loras == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": "all"}, "adapter_config.json: bias 'all' is not supported"),
        ({"use_dora": True}, "adapter_config.json: use_dora True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"adapter_config.json: modules_to_save \['lm_head'\] is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "adapter_config.json: init_lora_weights 'pissa_niter_16'"),
        ({"fan_in_fan_out": True}, "adapter_config.json: fan_in_fan_out True is not supported"),
        ({"peft_type": "LOHA"}, "adapter_config.json: peft_type 'LOHA' is not supported, only 'LORA'"),
        ({"lora_alpha": "16"}, "adapter_config.json: lora_alpha must be a positive number, not '16'"),
        ({"r": 0}, "adapter_config.json: r must be a positive number, not 0"),
        ({"r": 17}, "rank 17 of model.layers.0.* exceeds max_lora_rank, which is 16"),
        ({"rank_pattern": {"(": 3}}, r"adapter_config.json: rank_pattern: '\(' is not a regular expression"),
        ({"rank_pattern": {"k_proj": 3}}, r"tensor .*k_proj.lora_A.weight has shape \(4, 64\)"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_computed_are_refused(
    change: dict[str, Any],
    message: str,
    checkpoint_dir: Callable[[str], Path],
    folder_of: Callable[[str, str], Path],
    tmp_path: Path,
) -> None:
    store = store_of(load(checkpoint_dir("qwen3")))
    source = folder_of("qwen3", "first")
    config = json.loads((source / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").symlink_to(source / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=message):
        store.read("broken", tmp_path)


PREFIX = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 64), "the adapter changes model.lm_head, which is not one of"),
        (PREFIX + "self_attn.q_proj.lora_magnitude_vector", (128,), "q_proj.lora_magnitude_vector is not supported"),
        (PREFIX + "self_attn.q_proj.lora_B.weight", (128, 5), r"q_proj.lora_B.weight has shape \(128, 5\), expected"),
        (PREFIX + "self_attn.q_norm.lora_A.weight", (4, 64), "the adapter changes model.layers.0.self_attn.q_norm"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), "does not begin with base_model.model."),
        (PREFIX + "self_attn.o_proj.lora_B.weight", None, "lora_B.weight of .*.self_attn.o_proj is missing"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    name: str,
    shape: tuple[int, ...] | None,
    message: str,
    checkpoint_dir: Callable[[str], Path],
    folder_of: Callable[[str, str], Path],
    tmp_path: Path,
) -> None:
    store = store_of(load(checkpoint_dir("qwen3")))
    source = folder_of("qwen3", "first")
    (tmp_path / "adapter_config.json").symlink_to(source / "adapter_config.json")
    tensors = load_file(source / "adapter_model.safetensors")
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=message):
        store.read("broken", tmp_path)


def test_files_that_cannot_be_read_are_named(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> None:
    store = store_of(load(checkpoint_dir("qwen3")))
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    for content, message in ((None, "No such file"), ("[]", "is not a JSON object"), ("{", "is not JSON")):
        if content is not None:
            config.write_text(content)
        with pytest.raises(AdapterError, match=f"adapter_config.json.*{message}"):
            store.read("broken", tmp_path)
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        store.read("broken", tmp_path)
    weights.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors has no tensors"):
        store.read("broken", tmp_path)
    weights.write_bytes(b"no tensors")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors cannot be read"):
        store.read("broken", tmp_path)
