"""Conversations, stored chats, compaction and threads with the unmodified clients in their strict modes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.processes import DEMO, PATIENCE_SECONDS, Gateway, Running, gateway, key, simple_policy, tenant
from tests.e2e.test_responses import QUESTION

pytestmark = pytest.mark.e2e

BRIEF: Any = {"role": "developer", "content": "Be brief."}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, local_engine: Running) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("kept")
    policy = simple_policy(local_engine.url, responses={"keep": "30d"}, tenants=[tenant("dev"), tenant("other")])
    with gateway(folder, policy, storage=f"sqlite:///{folder / 'state.db'}") as started:
        yield started


def test_responses_in_a_conversation_equal_those_of_the_whole_input(front: Gateway) -> None:
    options: Any = {"model": DEMO, "temperature": 0, "max_output_tokens": 16}
    with front.client() as client:
        conversation = client.conversations.create(items=[BRIEF], metadata={"user": "u17"})
        first = client.responses.create(**options, input=QUESTION, conversation=conversation.id)
        second = client.responses.create(**options, input="Why?", conversation={"id": conversation.id})
        assert second.conversation is not None and second.conversation.id == conversation.id
        whole: Any = [BRIEF, {"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "Why?"}]
        by_hand = client.responses.create(**options, input=whole, store=False)
        assert second.output_text == by_hand.output_text
        items = [*client.conversations.items.list(conversation.id, order="asc", limit=2)]
        assert [getattr(item, "role", None) for item in items] == [
            "developer",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert client.conversations.items.retrieve(str(items[1].id), conversation_id=conversation.id) == items[1]
        added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "more"}])
        client.conversations.items.delete(str(added.data[0].id), conversation_id=conversation.id)
        assert client.conversations.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
        with front.client("other") as theirs, pytest.raises(openai.NotFoundError):
            theirs.conversations.retrieve(conversation.id)
        assert client.conversations.delete(conversation.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**options, input="x", conversation=conversation.id)


def test_replies_in_a_thread_equal_those_of_the_whole_conversation(front: Gateway) -> None:
    options: Any = {"model": DEMO, "max_tokens": 16, "system": "Be brief.", "extra_body": {"temperature": 0}}
    strict: Any = {"max_retries": 0, "timeout": PATIENCE_SECONDS, "_strict_response_validation": True}
    with anthropic.Anthropic(base_url=front.url, api_key=key("dev"), **strict) as client:
        thread = client.beta.messages.thread(**options)
        thread.send({"role": "user", "content": QUESTION})
        with thread.stream({"role": "user", "content": "Why?"}) as stream:
            second = stream.get_final_message()
        assert thread.previous_message_id == second.id and len(thread.messages) == 4
        by_hand = client.beta.messages.create(**options, messages=[*thread.messages[:3]])
        assert [block.to_dict() for block in second.content] == [block.to_dict() for block in by_hand.content]
        third = thread.send({"role": "user", "content": "And?"})
    receipt = front.receipt(third.id.replace("msg_", "req_"))
    assert receipt["cache_read"] > 0, "the prompt of the whole conversation is cached"
    assert receipt["input_uncached"] + receipt["cache_read"] > second.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_stored_listed_changed_and_deleted(front: Gateway, stream: bool) -> None:
    topic = secrets.token_hex(8)
    options: Any = {"model": DEMO, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
    with front.client() as client:
        reply: Any = client.chat.completions.create(**options, store=True, metadata={"topic": topic}, stream=stream)
        if stream:
            chunks = [*reply]
            name, text = chunks[0].id, "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        else:
            name, text = reply.id, reply.choices[0].message.content
        stored = client.chat.completions.retrieve(name)
        assert (stored.choices[0].message.content, stored.choices[0].finish_reason) == (text, "length")
        assert [each.id for each in client.chat.completions.list(metadata={"topic": topic}, model=DEMO)] == [name]
        client.chat.completions.update(name, metadata={"topic": f"{topic}!"})
        assert [*client.chat.completions.list(metadata={"topic": topic})] == []
        assert client.chat.completions.delete(name).deleted
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.retrieve(name)
    # The types of the client know messages of the assistant only.
    with front.client(_strict_response_validation=False) as client:
        again = client.chat.completions.create(**options, store=True)
        (message,) = client.chat.completions.messages.list(again.id)
        assert message.content == QUESTION


def test_a_conversation_is_compacted_and_continued(front: Gateway) -> None:
    with front.client() as client:
        first = client.responses.create(model=DEMO, input=QUESTION, max_output_tokens=32)
        # The types of the client know output messages of the assistant only.
        raw = client.responses.with_raw_response.compact(model=DEMO, previous_response_id=first.id)
        compacted = json.loads(raw.content)
        assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
        items: Any = [*compacted["output"], {"role": "user", "content": "Why?"}]
        after = client.responses.create(model=DEMO, input=items, max_output_tokens=8)
        assert after.output_text
    receipt = front.receipt(compacted["id"].replace("resp_", "req_"))
    assert receipt["outcome"] == "complete" and receipt["output"] == compacted["usage"]["output_tokens"]
