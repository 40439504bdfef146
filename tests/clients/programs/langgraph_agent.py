"""LangGraph: a graph of one node that calls the model."""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

model = ChatOpenAI(model="m")


def answer(state: MessagesState) -> dict[str, Any]:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("answer", answer)
graph.add_edge(START, "answer")
graph.add_edge("answer", END)
result = graph.compile().invoke({"messages": [{"role": "user", "content": "hi"}]})
assert result["messages"][-1].content
