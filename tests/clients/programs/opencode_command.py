"""opencode: it runs a command by OpenAI's chats, by responses, and by Anthropic's messages."""

import json
import os
import subprocess
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
packages = {"chats": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}
# Without limits, it asks for 32,000 tokens of output, for which the bundled engine's context has no room.
model = {"name": "m", "limit": {"context": 40_000, "output": 500}}
config = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "permission": {"bash": "allow"},
    "provider": {
        name: {"npm": package, "options": {"baseURL": base, "apiKey": key}, "models": {"m": model}}
        for name, package in packages.items()
    },
}
project = Path("project")
project.mkdir()
os.chdir(project)
Path("opencode.json").write_text(json.dumps(config))
Path("note.txt").write_text("the note says Rome\n")
subprocess.run(["git", "init", "-q", "."], check=True)
env = {**os.environ, "PWD": str(Path.cwd()), "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
prompt = f"CALL bash {json.dumps({'command': 'cat note.txt', 'description': 'Reads the note'})}"
for provider in packages:
    command = [f"{os.environ['CLIENT_BINARIES']}/opencode", "run", "--print-logs", "--model", f"{provider}/m", prompt]
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout, flush=True)
    assert ended.returncode == 0
    assert "The tool said: the note says Rome" in ended.stdout or not SCRIPTED, provider
