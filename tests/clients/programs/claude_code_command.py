"""Claude Code: it runs a command, reads an image, continues the conversation, and runs a subagent."""

import base64
import json
import os
import subprocess
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
Path("note.txt").write_text("the note says Rome\n")
Path("dot.png").write_bytes(base64.b64decode(PNG))
subprocess.run(["git", "init", "-q", "."], check=True)
env = {**os.environ, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}


def claude(prompt: str, *options: str) -> str:
    command = [f"{os.environ['CLIENT_BINARIES']}/claude", "-p", prompt, "--allowedTools", "Bash,Read,Agent", *options]
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout, flush=True)
    assert ended.returncode == 0
    return ended.stdout


reading = f"CALL Bash {json.dumps({'command': 'cat note.txt', 'description': 'Reads the note'})}"
said = claude(reading, "--model", "m")
assert "The tool said: the note says Rome" in said or not SCRIPTED, said
assert claude("hi", "--continue", "--model", "m").strip()
if SCRIPTED:  # the bundled model sees no images
    claude(f"CALL Read {json.dumps({'file_path': str(Path('dot.png').resolve())})}", "--model", "m")
# With its default model, it sends thinking, an effort and its own betas.
said = claude(f"CALL Agent {json.dumps({'description': 'Greets', 'prompt': 'hi', 'subagent_type': 'general-purpose'})}")
assert "Hello from the scripted server." in said or not SCRIPTED, said
