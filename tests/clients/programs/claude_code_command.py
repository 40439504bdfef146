"""Claude Code with its defaults: it runs a command and shows the answer."""

import json
import os
import subprocess
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
Path("note.txt").write_text("the note says Rome\n")
subprocess.run(["git", "init", "-q", "."], check=True)
env = {**os.environ, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}


def claude(prompt: str, *arguments: str) -> str:
    command = [f"{os.environ['CLIENT_BINARIES']}/claude", "-p", prompt, "--allowedTools", "Bash,Read", *arguments]
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout)
    assert ended.returncode == 0
    return ended.stdout


said = claude(f"CALL Bash {json.dumps({'command': 'cat note.txt', 'description': 'Reads the note'})}", "--model", "m")
assert "The tool said: the note says Rome" in said or not SCRIPTED, said
