"""The clients of the table, their packages and programs."""

from __future__ import annotations

from tests.clients.installing import Client

CLIENTS = (
    Client("openai", "openai_python.py", does="chats, streams, tools, JSON schemas, responses, embeddings, models"),
    Client("anthropic", "anthropic_python.py", does="messages, streams, tool runner, threads, token counts, models"),
    Client("langchain", "langchain_agent.py", ("langchain-openai", "langchain-anthropic"), does="agents by both APIs"),
    Client("langgraph", "langgraph_graph.py", ("langchain-openai",), does="a graph with a tool node, streamed"),
    Client("llama-index-llms-openai-like", "llama_index_agent.py", does="completions, streams, function calls"),
    Client("instructor", "instructor_models.py", does="structured answers by tools, JSON and JSON schema"),
    Client("pydantic-ai-slim", "pydantic_ai_agent.py", extra="openai,anthropic", does="agents by three APIs, streams"),
    Client("openai-agents", "openai_agents_run.py", does="agents by responses and chats, streamed"),
    Client("litellm", "litellm_calls.py", does="chats, streams, tools, messages, responses, embeddings"),
    Client("llm", "llm_command.py", does="its command with a function and a stream"),
    Client("aider-chat", "aider_command.py", does="edits a file"),
    Client(
        "lm-eval", "lm_eval_command.py", ("transformers",), extra="api",
        does="a task of generations by chats and completions",
    ),
    Client("aiperf", "aiperf_command.py", does="a profile of streamed chats"),
    Client("openai", "openai_node.mjs", registry="npm", does="chats, streams, its tool runner, responses, embeddings"),
    Client("@anthropic-ai/sdk", "anthropic_node.mjs", registry="npm", does="messages, streams, its tool runner"),
    Client(
        "ai", "vercel_ai.mjs", ("@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
        registry="npm", does="texts, streams, tools, objects by chats, responses and messages",
    ),
    Client("@openai/codex", "codex_command.py", registry="npm", does="commands, patches, images, schemas"),
    Client("@anthropic-ai/claude-code", "claude_code_command.py", registry="npm", does="runs a command"),
    Client("opencode-ai", "opencode_command.py", registry="npm", does="runs a command"),
    Client(
        "promptfoo", "promptfoo_command.py", registry="npm", does="an evaluation by chats, responses and messages",
        node="22",
    ),
)  # fmt: skip
