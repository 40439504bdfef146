"""The bundled model: it is trained, so its argmax is unambiguous, and it has a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from backend.engine import paged_model
from backend.engine.config import EngineConfig
from backend.engine.detokenizer import Detokenizer
from backend.engine.engine import Engine
from backend.engine.outputs import FinishReason
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.kv_cache import KV_FORMATS
from backend.ops.reference import ReferenceOps

WEIGHTS = Path(__file__).parents[3] / "backend" / "demo_model" / "weights"
QUESTIONS = ["What is Warmpath?", "Hello!", "What is 17 + 25?"]

pytestmark = pytest.mark.skipif(not (WEIGHTS / "model.safetensors").exists(), reason="the demo model is not built")


def test_its_answers_are_those_of_transformers() -> None:
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    engine = Engine.load(EngineConfig(model_dir=WEIGHTS, dtype="float32", num_blocks=64, num_threads=1))
    stop_token_ids = engine.config.model.eos_token_ids
    sampling = SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=stop_token_ids)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]
    requests = [Request(question, prompt, sampling) for question, prompt in zip(QUESTIONS, prompts, strict=True)]
    texts = {question: Detokenizer(tokenizer) for question in QUESTIONS}
    answers = dict.fromkeys(QUESTIONS, "")
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        for output in engine.step():
            answers[output.request_id] += texts[output.request_id].push(output.new_token_ids)

    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    for request in requests:
        input_ids = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            (expected,) = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=sorted(stop_token_ids),
            )
        assert request.token_ids == expected.tolist()
        assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        output = expected[input_ids.shape[1] :].tolist()
        assert answers[request.request_id] == tokenizer.decode(output)


@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_keys_and_values_are_stored_by_one_operation_per_layer(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountingOps(ReferenceOps):
        num_calls = 0

        def norm_rope_store(self, *args: Any) -> Tensor:
            self.num_calls += 1
            return super().norm_rope_store(*args)

    ops = CountingOps()
    monkeypatch.setattr(paged_model, "create_ops", lambda name: ops)
    config = EngineConfig(
        model_dir=WEIGHTS, num_blocks=16, num_threads=1, ops="reference", kv_cache_dtype=kv_cache_dtype
    )
    engine = Engine.load(config)
    engine.add(Request("r", [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0)))
    engine.step()
    assert ops.num_calls == engine.config.model.num_layers
