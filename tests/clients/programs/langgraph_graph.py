"""LangGraph: a graph of a model and a tool node, run and streamed."""

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

SCRIPTED = os.environ["AGAINST"] == "scripted"


def weather(city: str) -> str:
    """Look the weather up."""
    return f"sunny in {city}"


model = ChatOpenAI(model="m", max_retries=0).bind_tools([weather])


def answer(state: MessagesState) -> dict[str, Any]:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("answer", answer)
graph.add_node("tools", ToolNode([weather]))
graph.add_edge(START, "answer")
graph.add_conditional_edges("answer", tools_condition)
graph.add_edge("tools", "answer")
compiled = graph.compile()
asked: Any = {"messages": [{"role": "user", "content": 'CALL weather {"city": "Rome"}'}]}
last = compiled.invoke(asked)["messages"][-1].content
assert last == "The tool said: sunny in Rome" or not SCRIPTED, last
assert list(compiled.stream(asked, stream_mode="messages"))
