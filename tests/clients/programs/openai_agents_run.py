"""OpenAI's Agents SDK with its default, the Responses API."""

from agents import Agent, Runner, set_tracing_disabled

set_tracing_disabled(True)
assert Runner.run_sync(Agent(name="a", model="m"), "hi").final_output
