"""The committed weights: they load, are small, and answer."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from backend.demo_model import WEIGHTS, corpus, evaluate, train

MEGABYTE = 1_000_000
GREETING = "Hello! I am the Warmpath demo model. Ask me about Warmpath, about LLM inference, or for a small sum."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield evaluate.load(WEIGHTS)
    torch.set_num_threads(threads)


@pytest.fixture
def tokenizer(loaded: tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]) -> PreTrainedTokenizerFast:
    return loaded[0]


def definition(name: str) -> str:
    return next(term.what for term in corpus.topics().terms if name in [known for known, _ in term.names])


def test_the_directory_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in WEIGHTS.iterdir()}
    assert set(files) == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 12 * MEGABYTE


def test_the_weights_match_the_configuration(
    loaded: tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM],
) -> None:
    tokenizer, model = loaded
    assert len(tokenizer) == train.VOCAB_SIZE == model.config.vocab_size
    assert model.num_parameters() == train.untrained_model().num_parameters()
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id


@pytest.mark.parametrize(
    "text", ["plain", "12 + 30 = 42.", "naïve café, 今日は", "😀👩‍🚀 e\u0301", "\t tabs\r\n\n  spaces ", "\x00\x7f", ""]
)
def test_the_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_both_copies_of_the_template_are_equal(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (WEIGHTS / "chat_template.jinja").read_bytes() == train.TEMPLATE.read_bytes()
    assert tokenizer.chat_template == train.TEMPLATE.read_text(encoding="utf-8")


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def test_a_conversation_is_rendered_as_a_prefix_of_its_continuation(tokenizer: PreTrainedTokenizerFast) -> None:
    for one in itertools.islice(corpus.conversations(9), 300):
        messages, tools = list(one.messages), list(one.tools) or None
        whole = rendered(tokenizer, messages, tools=tools)
        for length in range(1, len(messages)):
            prompted = messages[length]["role"] == "assistant"
            assert whole.startswith(rendered(tokenizer, messages[:length], tools=tools, add_generation_prompt=prompted))


def test_the_template_renders_calls_as_the_model_generates_them(tokenizer: PreTrainedTokenizerFast) -> None:
    call = corpus.tool_call_text("get_weather", {"city": "São Paulo"})
    for arguments in ({"city": "São Paulo"}, '{"city": "São Paulo"}'):
        outputs = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}]}
        text = rendered(tokenizer, [{"role": "user", "content": "?"}, outputs], tools=[WEATHER])
        assert text.endswith(f"<|im_start|>assistant\n{call}<|im_end|>\n")


def test_content_parts_render_as_their_text(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert rendered(tokenizer, [{"role": "developer", "content": parts}]) == "<|im_start|>system\nHello<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "narrator", "content": "x"}], "unknown message role: narrator"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content parts of type image_url"),
    ],
)
def test_unsupported_messages_are_rejected(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(Exception, match=reason):  # jinja2's TemplateError, raised through transformers
        rendered(tokenizer, messages)


def test_answers(loaded: tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]) -> None:
    expected = {
        "Hello": GREETING,
        "hi!": GREETING,
        "Say this is a test": "This is a test.",
        "What is prefix caching?": definition("prefix caching"),
        "what's prefix caching": definition("prefix caching"),
        "What is Warmpath?": definition("Warmpath"),
        "What is the KV cache?": definition("the KV cache"),
        "Explain continuous batching, please.": definition("continuous batching"),
        "What does TTFT mean?": definition("TTFT"),
        "What is 12 + 30?": "12 + 30 = 42.",
        "7 * 8": "7 * 8 = 56.",
        "Who was Napoleon?": corpus.REFUSAL,
    }
    outputs = evaluate.answers(*loaded, [evaluate.question(text) for text in expected])
    assert dict(zip(expected, outputs, strict=True)) == expected


def test_answers_after_a_long_system_prompt(loaded: tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]) -> None:
    system = "You are a helpful assistant. Be polite to every customer, and never talk about prices. " * 60
    outputs = evaluate.answers(*loaded, [evaluate.question("What is prefix caching?", system)])
    assert outputs == [definition("prefix caching")]


def test_a_tool_call_and_its_result(loaded: tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]) -> None:
    question = evaluate.question("What is the weather in Paris?").messages
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    answered = (
        *question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    )
    outputs = evaluate.answers(
        *loaded,
        [corpus.Conversation("tools", question, (WEATHER,)), corpus.Conversation("tools", answered, (WEATHER,))],
    )
    assert outputs == [corpus.tool_call_text("get_weather", {"city": "Paris"}), "The tool says: sunny"]
