"""The command `llm`: an answer, a stream and a function."""

import json
import os
import subprocess
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
folder = Path.home() / "llm"
folder.mkdir()
entry = {
    "model_id": "m",
    "model_name": "m",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key_name": "warmpath",
    "supports_tools": True,
}
(folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
(folder / "keys.json").write_text(json.dumps({"warmpath": os.environ["OPENAI_API_KEY"]}))
env = {**os.environ, "LLM_USER_PATH": str(folder)}


def llm(*arguments: str) -> str:
    command = [f"{os.environ['CLIENT_BINARIES']}/llm", "-m", "m", *arguments]
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


assert llm("hi").strip()
assert llm("hi", "--no-stream").strip()
function = 'def weather(city: str) -> str:\n    "Look the weather up."\n    return "sunny in " + city\n'
said = llm("--functions", function, 'CALL weather {"city": "Rome"}')
assert "The tool said: sunny in Rome" in said or not SCRIPTED, said
