"""The command `aider`: the model writes a file."""

import json
import os
import subprocess
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
subprocess.run(["git", "init", "-q", "."], check=True)  # aider keeps its history at the repository's root
file = Path("greeting.txt")
file.write_text("bye\n")
answer = "greeting.txt\n```\nhello\n```\n"
command = [
    f"{os.environ['CLIENT_BINARIES']}/aider", "--model", "openai/m", "--edit-format", "whole", "--no-git",
    "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-show-release-notes",
    "--message", f"ANSWER {json.dumps(answer)}", str(file),
]  # fmt: skip
env = {**os.environ, "OPENAI_API_BASE": os.environ["OPENAI_BASE_URL"]}
ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(ended.stdout)
assert ended.returncode == 0 and "Error:" not in ended.stdout
assert file.read_text() == "hello\n" or not SCRIPTED, file.read_text()
