"""LangChain's chat model: an answer, a stream and token counts."""

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="m", stream_usage=True)
answer = model.invoke("hi")
assert answer.content and answer.usage_metadata
chunks = list(model.stream("hi"))
assert "".join(str(chunk.content) for chunk in chunks)
