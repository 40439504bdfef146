"""The command `llm`: an answer, a stream and a function."""

import os
import subprocess
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
folder = Path.home() / "llm"
folder.mkdir()
entry = f"- model_id: m\n  model_name: m\n  api_base: {os.environ['OPENAI_BASE_URL']}\n  supports_tools: true\n"
(folder / "extra-openai-models.yaml").write_text(entry)
env = {**os.environ, "LLM_USER_PATH": str(folder)}


def llm(*arguments: str) -> str:
    command = [f"{os.environ['CLIENT_BINARIES']}/llm", "-m", "m", *arguments]
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


assert llm("hi").strip()
assert llm("hi", "--no-stream").strip()
function = 'def weather(city: str) -> str:\n    "Look the weather up."\n    return "sunny in " + city\n'
said = llm("--functions", function, 'CALL weather {"city": "Rome"}')
assert "The tool said: sunny in Rome" in said or not SCRIPTED, said
