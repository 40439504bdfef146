"""The command `promptfoo`: an evaluation by chats, responses and Anthropic's messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
base, anthropic = os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"]
config = {
    "prompts": ["Say {{word}}."],
    "providers": [
        {"id": "openai:chat:m", "config": {"apiBaseUrl": base}},
        {"id": "openai:responses:m", "config": {"apiBaseUrl": base}},
        {"id": "anthropic:messages:m", "config": {"apiBaseUrl": anthropic, "max_tokens": 100}},
    ],
    "tests": [{"vars": {"word": "hi"}, "assert": [{"type": "contains", "value": "Hello"}] if SCRIPTED else []}],
}
Path("promptfooconfig.json").write_text(json.dumps(config))
env = {
    **os.environ, "PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_DISABLE_SHARING": "1",
    "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
}  # fmt: skip
command = [f"{os.environ['CLIENT_BINARIES']}/promptfoo", "eval", "-c", "promptfooconfig.json", "-o", "out.json"]
ended = subprocess.run([*command, "--no-cache"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(ended.stdout)
if not Path("out.json").exists():  # it refuses to start with an old Node.js
    sys.exit(" ".join(ended.stdout.split()))
stats = json.loads(Path("out.json").read_text())["results"]["stats"]
assert (stats["successes"], stats["errors"]) == (3, 0), stats
