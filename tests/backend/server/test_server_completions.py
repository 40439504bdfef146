"""The other endpoints of a running engine: completions, embeddings, tokenization and rendered requests."""

from __future__ import annotations

import base64
import math
import struct
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.backend.server.common_requests import GREEDY, MESSAGES

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer

pytestmark = pytest.mark.e2e


def test_completions_accept_all_forms_of_a_prompt(server: RunningServer) -> None:
    client = server.client()

    def texts(prompt: Any, **options: Any) -> list[str]:
        reply = client.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=5, **options)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    a, b = "The quick brown", "Hello"
    ids = [httpx2.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in (a, b)]
    (of_a,), (of_b,) = texts(a), texts(b)
    assert texts([a, b]) == [of_a, of_b]
    assert texts(ids[0]) == [of_a]
    assert texts(ids) == [of_a, of_b]
    assert texts([a, b], n=2) == [of_a, of_a, of_b, of_b]
    assert texts(a, echo=True) == [a + of_a]
    # OpenAI's type for these chunks forbids null, but finish_reason is null until the last chunk.
    streamed = server.client(strict=False).completions.create(
        model=server.model, prompt=[a, b], temperature=0, max_tokens=5, echo=True, stream=True
    )
    found = ["", ""]
    for chunk in streamed:
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == [a + of_a, b + of_b]


def test_special_tokens_are_shown_if_requested(server: RunningServer) -> None:
    def tokens(path: str, **fields: Any) -> list[int]:
        reply = httpx2.post(f"{server.base_url}/{path}/render", json={"model": server.model, **fields})
        rendered: Any = reply.json()
        return list((rendered if isinstance(rendered, dict) else rendered[0])["token_ids"])

    bos = 0
    assert tokens("completions", prompt="Hello")[0] == bos
    assert tokens("completions", prompt="Hello", add_special_tokens=True) == tokens("completions", prompt="Hello")
    assert tokens("completions", prompt="Hello", add_special_tokens=False) == tokens("completions", prompt="Hello")[1:]
    plain = tokens("chat/completions", messages=MESSAGES)
    assert tokens("chat/completions", messages=MESSAGES, add_special_tokens=False) == plain
    assert tokens("chat/completions", messages=MESSAGES, add_special_tokens=True) == [bos, *plain]


def test_completion_logprobs(server: RunningServer) -> None:
    reply = server.client().completions.create(
        model=server.model, prompt="The quick", temperature=0, max_tokens=5, logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == 5
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(5)]
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)


def test_embeddings(server: RunningServer) -> None:
    client = server.client()
    inputs = ["Hello, world!", "Größe 東京", "x " * 600]
    plain = client.embeddings.create(model=server.model, input=inputs, encoding_format="float")
    vectors = [item.embedding for item in plain.data]
    for vector in vectors:
        assert len(vector) == 64
        assert math.isclose(math.hypot(*vector), 1, rel_tol=1e-5)
    # By default the client requests base64, and decodes it after its own strict validation.
    lenient = server.client(strict=False)
    for item, vector in zip(lenient.embeddings.create(model=server.model, input=inputs).data, vectors, strict=True):
        assert item.embedding == pytest.approx(vector, abs=1e-6)
    body = {"model": server.model, "input": inputs[0], "encoding_format": "base64"}
    raw = httpx2.post(f"{server.base_url}/embeddings", json=body).json()
    assert struct.unpack("<64f", base64.b64decode(raw["data"][0]["embedding"])) == pytest.approx(vectors[0], abs=1e-6)
    ids = [httpx2.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in inputs]
    assert plain.usage.prompt_tokens == sum(map(len, ids))
    for given in (ids, ids[0]):
        assert lenient.embeddings.create(model=server.model, input=given).data[0].embedding == pytest.approx(
            vectors[0], abs=1e-6
        )
    many = lenient.embeddings.create(model=server.model, input=["a", "b"] * 40).data
    assert len({tuple(item.embedding) for item in many[::2]}) == 1
    assert [item.index for item in many] == list(range(80))


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    text = "Hello, naïve 東京 🙂"
    counted = httpx2.post(f"{server.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert counted["max_model_len"] == 8192
    assert httpx2.post(f"{server.url}/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"] == "<s>" + text
    chat = httpx2.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()
    used = server.client().chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY).usage
    assert used is not None
    assert chat["count"] == used.prompt_tokens


def test_an_echoed_prompt_has_logprobs_too(server: RunningServer) -> None:
    def create(**options: Any) -> Any:
        client = server.client(strict=False)
        return client.completions.create(
            model=server.model, prompt="The quick brown", temperature=0, echo=True, logprobs=2, **options
        )

    choice = create(max_tokens=3).choices[0]
    prompt = httpx2.post(f"{server.url}/tokenize", json={"prompt": "The quick brown"}).json()
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == prompt["count"] + 3 == len(logprobs.text_offset)
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
    assert "".join(logprobs.tokens) == "<s>" + choice.text
    # Scores a text and generates nothing, as evaluation harnesses do.
    scored = create(max_tokens=0)
    assert scored.choices[0].text == "The quick brown"
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[: prompt["count"]]
    assert (scored.usage.completion_tokens, scored.choices[0].finish_reason) == (0, "length")
    chunks = [chunk.choices[0] for chunk in create(max_tokens=3, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    for name in ("tokens", "text_offset"):
        assert [value for c in chunks if c.logprobs for value in getattr(c.logprobs, name)] == getattr(logprobs, name)


def test_prompt_logprobs_and_token_ids_in_vllms_format(server: RunningServer) -> None:
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    chat = server.client().chat.completions.create(model=server.model, messages=MESSAGES, extra_body=extra, **GREEDY)
    extra_fields = chat.model_extra or {}
    assert chat.usage is not None
    assert len(extra_fields["prompt_token_ids"]) == len(extra_fields["prompt_logprobs"]) == chat.usage.prompt_tokens
    assert extra_fields["prompt_logprobs"][0] is None
    for token_id, scored in zip(extra_fields["prompt_token_ids"][1:], extra_fields["prompt_logprobs"][1:], strict=True):
        assert scored[str(token_id)]["logprob"] <= max(entry["logprob"] for entry in scored.values()) <= 0
        by_rank = sorted(scored.values(), key=lambda entry: entry["rank"])
        assert by_rank[0]["rank"] == 1
        assert (by_rank[-1]["rank"] == 1) == (len(scored) == 1)
        assert by_rank == sorted(by_rank, key=lambda entry: -entry["logprob"])
    text = server.client().completions.create(model=server.model, prompt=[5, 6, 7], extra_body=extra, **GREEDY)
    extra_fields = text.choices[0].model_extra or {}
    assert extra_fields["prompt_token_ids"] == [5, 6, 7]
    assert len(extra_fields["token_ids"]) == 12
    stream = server.client(strict=False).completions.create(
        model=server.model, prompt=[5, 6, 7], extra_body={"return_token_ids": True}, stream=True, **GREEDY
    )
    extras = [chunk.choices[0].model_extra or {} for chunk in stream]
    assert [token for extra in extras for token in extra["token_ids"]] == extra_fields["token_ids"]
    assert [extra.get("prompt_token_ids") for extra in extras] == [[5, 6, 7]] + [None] * (len(extras) - 1)


def test_best_of(server: RunningServer) -> None:
    def create(**options: Any) -> Any:
        return server.client().completions.create(
            model=server.model, prompt=["Hello", "The"], temperature=1.2, max_tokens=6, seed=4, **options
        )

    every = create(n=6, logprobs=0).choices
    best = create(n=2, best_of=6)
    assert best.usage.completion_tokens == create(n=6).usage.completion_tokens
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    for first in (0, 6):
        of_prompt = every[first : first + 6]
        means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in of_prompt}
        ranked = sorted(means, key=lambda text: -means[text])[:2]
        assert [choice.text for choice in best.choices[first // 3 : first // 3 + 2]] == ranked


def test_a_stop_string_can_be_included(server: RunningServer) -> None:
    def text(**options: Any) -> str:
        reply = server.client().completions.create(model=server.model, prompt="The quick", **GREEDY, **options)
        return str(reply.choices[0].text)

    stop = text()[4:7]
    kept = text(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept == text(stop=stop) + stop


def test_rendered_requests_equal_computed_ones(server: RunningServer) -> None:
    body: Any = {"model": server.model, "messages": MESSAGES, "seed": 3, "stop": "x", "priority": 4, "n": 2}
    rendered = httpx2.post(f"{server.base_url}/chat/completions/render", json=body).json()
    assert rendered["token_ids"] == httpx2.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    params = rendered["sampling_params"]
    assert (params["n"], params["seed"], params["stop"], rendered["priority"]) == (2, 3, ["x"], 4)
    assert params["max_tokens"] == 8192 - len(rendered["token_ids"])
    # A prompt of token ids gives the same output as the messages.
    chat = server.client().chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY)
    text = server.client().completions.create(model=server.model, prompt=rendered["token_ids"], **GREEDY)
    assert text.choices[0].text == chat.choices[0].message.content
    of_ids = {"model": server.model, "prompt": [[5, 6], [7]]}
    several = httpx2.post(f"{server.base_url}/completions/render", json=of_ids)
    assert [len(one["token_ids"]) for one in several.json()] == [2, 1]
    wrong = httpx2.post(f"{server.base_url}/chat/completions/render", json=body | {"top_p": 3})
    assert wrong.json()["error"]["param"] == "top_p"
