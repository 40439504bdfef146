"""vLLM's additional request fields on a real server."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from backend.server.unknown_members import HEADER
from tests.backend.server.conftest import MAX_MODEL_LEN, RunningServer

BOS = 0
PROMPT = "The quick brown fox jumps over the lazy dog."
MESSAGES = [{"role": "user", "content": PROMPT}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}


def ask(server: RunningServer, path: str = TEXT, **fields: Any) -> Any:
    prompts: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": PROMPT}}
    reply = httpx2.post(server.url + path, json=prompts.get(path, {}) | fields, timeout=60)
    return reply.json()


def tokens_of(server: RunningServer, text: str) -> list[int]:
    tokens: list[int] = ask(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    return tokens


def test_a_request_without_a_model_uses_the_served_one(server: RunningServer) -> None:
    for path in (CHAT, TEXT, "/v1/embeddings"):
        fields = {"input": "a"} if path == "/v1/embeddings" else {"max_tokens": 1}
        assert ask(server, path, **fields)["model"] == server.model
        assert ask(server, path, **fields, model=None)["model"] == server.model
    assert ask(server, TEXT + "/render")["error"]["param"] == "prompt"
    assert ask(server, TEXT + "/render", prompt="a")[0]["model"] == server.model


def test_version(server: RunningServer) -> None:
    assert httpx2.get(f"{server.url}/version").json()["version"].count(".") == 2


def test_token_strings_are_those_of_the_vocabulary(server: RunningServer) -> None:
    assert ask(server, "/tokenize", prompt=" 京", return_token_strs=True)["token_strs"][:2] == ["<s>", "Ġ"]


def test_a_long_prompt_is_truncated_at_the_requested_side(server: RunningServer) -> None:
    plain = tokens_of(server, PROMPT)

    def read(path: str = TEXT, **fields: Any) -> list[int]:
        rendered = ask(server, path + "/render", **fields, **({"prompt": PROMPT} if path == TEXT else {}))
        token_ids: list[int] = (rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]
        return token_ids

    assert read(truncate_prompt_tokens=4) == [BOS, *plain[-3:]]
    assert read(truncate_prompt_tokens=4, truncation_side="right") == [BOS, *plain[:3]]
    assert read(truncate_prompt_tokens=4, add_special_tokens=False) == plain[-4:]
    assert read(truncate_prompt_tokens=1) == plain[-1:]
    assert read(truncate_prompt_tokens=1000) == [BOS, *plain]
    assert ask(server, prompt=[5, 6, 7], truncate_prompt_tokens=2, **GREEDY)["choices"][0]["prompt_token_ids"] == [6, 7]
    chat = ask(server, CHAT + "/render", messages=MESSAGES)["token_ids"]
    assert ask(server, CHAT + "/render", messages=MESSAGES, truncate_prompt_tokens=5)["token_ids"] == chat[-5:]
    echoed = ask(server, truncate_prompt_tokens=3, echo=True, **GREEDY)["choices"][0]["text"]
    assert echoed.startswith("<s>" + PROMPT[-len(ask(server, "/detokenize", tokens=plain[-2:])["prompt"]) :])


@pytest.mark.slow
def test_a_prompt_is_truncated_to_the_available_context(server: RunningServer) -> None:
    long = "x " * MAX_MODEL_LEN
    for path, fields in ((TEXT, {"prompt": long}), (CHAT, {"messages": [{"role": "user", "content": long}]})):
        usage = ask(server, path, **fields, truncate_prompt_tokens=-1, **GREEDY | {"ignore_eos": True})["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (MAX_MODEL_LEN - 8, 8)
    embedded = ask(server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert embedded["usage"]["prompt_tokens"] == MAX_MODEL_LEN
    few, many = (ask(server, "/v1/embeddings", input=PROMPT[:n], truncate_prompt_tokens=3) for n in (20, 40))
    assert few["data"] == many["data"]  # an embedding input keeps its beginning


def test_only_allowed_tokens_are_generated(server: RunningServer) -> None:
    for path in (CHAT, TEXT):
        choice = ask(server, path, allowed_token_ids=[40, 41, 511], **GREEDY)["choices"][0]
        assert len(choice["token_ids"]) == 8
        assert set(choice["token_ids"]) <= {40, 41, 511}
        biased = ask(server, path, allowed_token_ids=[40, 41], logit_bias={"41": 100, "42": 100}, **GREEDY)
        assert biased["choices"][0]["token_ids"] == [41] * 8
        several = ask(server, path, allowed_token_ids=[40, 41], max_tokens=9, n=3, return_token_ids=True, seed=1)
        assert all(set(each["token_ids"]) <= {40, 41} for each in several["choices"])
    ended = ask(server, allowed_token_ids=[40, 1], min_tokens=4, logit_bias={"1": 100}, **GREEDY)["choices"][0]
    assert ended["token_ids"] == [40, 40, 40, 40, 1]


def test_bad_words_are_not_generated(server: RunningServer) -> None:
    (dog,) = tokens_of(server, " dog")
    options = {"logit_bias": {str(dog): 100}, **GREEDY}
    for path in (CHAT, TEXT):

        def generate(path: str = path, **fields: Any) -> list[int]:
            token_ids: list[int] = ask(server, path, **options, **fields)["choices"][0]["token_ids"]
            return token_ids

        assert generate() == [dog] * 8
        assert dog not in generate(bad_words=["never", "dog"])
        alternating = generate(bad_words=["dog dog"])
        assert alternating[::2] == [dog] * 4
        assert dog not in alternating[1::2]


def test_tokens_are_named_by_id(server: RunningServer) -> None:
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, **GREEDY}
    text = ask(server, logprobs=2, **fields)["choices"][0]
    names = [f"token_id:{token_id}" for token_id in text["token_ids"]]
    assert text["logprobs"]["tokens"] == names
    assert [next(iter(top)) for top in text["logprobs"]["top_logprobs"]] == names
    chat = ask(server, CHAT, logprobs=True, top_logprobs=1, **fields)["choices"][0]
    names = [f"token_id:{token_id}" for token_id in chat["token_ids"]]
    assert [each["token"] for each in chat["logprobs"]["content"]] == names
    assert [each["top_logprobs"][0]["token"] for each in chat["logprobs"]["content"]] == names


def test_a_completion_reports_as_many_alternatives_as_a_chat(server: RunningServer) -> None:
    logprobs = ask(server, logprobs=20, return_tokens_as_token_ids=True, **GREEDY)["choices"][0]["logprobs"]
    assert {len(top) for top in logprobs["top_logprobs"]} == {20}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "truncation_side"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "guided_choice": ["a"]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a", " "]}, "bad_words[1]"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
    ],
)
def test_unsupported_fields_are_rejected_by_name(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    for path in (CHAT, TEXT):
        assert ask(server, path, **fields)["error"]["param"] == param


def test_a_constraint_of_vllms_client_is_accepted(server: RunningServer) -> None:
    """vLLM's client sends all fields, most with their defaults."""
    options = {
        "json": None,
        "regex": "[ab]{3}",
        "choice": None,
        "grammar": None,
        "json_object": None,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
        "whitespace_pattern": None,
        "structural_tag": None,
    }
    assert set(ask(server, structured_outputs=options, **GREEDY)["choices"][0]["text"]) <= {"a", "b"}
    labels = [f"label {i}" for i in range(1000)]
    assert ask(server, guided_choice=labels, **GREEDY | {"max_tokens": 20})["choices"][0]["text"] in labels


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_routers_add_are_passed_over(server: RunningServer, path: str) -> None:
    """vllm-router 0.1.17 and sglang-router 0.3.2 add the first four of SGLang's fields to every request."""
    url = f"{server.url}{path}"
    body = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    added = {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True}
    reply = httpx2.post(url, json=body | added | {"max_tokens": 1, "lora_path": None})
    assert reply.status_code == 200
    assert HEADER not in reply.headers
    reply = httpx2.post(url, json=body | added | {"max_tokens": 1, "return_hidden_states": True, "rid": "a"})
    assert reply.status_code == 200
    assert reply.headers[HEADER] == "return_hidden_states, rid"
    for name in ("sampling_seed", "regex", "temperature_x"):
        reply = httpx2.post(url, json=body | {name: "1"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_a_stop_string_is_kept_if_sglangs_field_says_so(server: RunningServer) -> None:
    forced: dict[str, Any] = {"structured_outputs": {"regex": "one two"}, "stop": [" two"], **GREEDY, "max_tokens": 20}
    assert ask(server, **forced)["choices"][0]["text"] == "one"
    assert ask(server, **forced, no_stop_trim=True)["choices"][0]["text"] == "one two"
