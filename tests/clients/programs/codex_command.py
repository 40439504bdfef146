"""Codex with its defaults: it runs a command, applies a patch, reads an image, answers by a schema, resumes."""

import base64
import json
import os
import subprocess
from pathlib import Path

SCRIPTED = os.environ["AGAINST"] == "scripted"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PATCH = "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch"

home = Path.home() / ".codex"
home.mkdir()
(home / "config.toml").write_text(
    f"""model = "m"
model_provider = "warmpath"
[model_providers.warmpath]
name = "Warmpath"
base_url = "{os.environ["OPENAI_BASE_URL"]}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
)
Path("note.txt").write_text("the note says Rome\n")
Path("dot.png").write_bytes(base64.b64decode(PNG))
Path("schema.json").write_text(
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    )
)
subprocess.run(["git", "init", "-q", "."], check=True)


def codex(prompt: str, *options: str, resumed: bool = False) -> str:
    command = [f"{os.environ['CLIENT_BINARIES']}/codex", "exec", *(("resume", "--last") if resumed else ())]
    command += [*options, "--dangerously-bypass-approvals-and-sandbox", "--", prompt]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout, flush=True)
    # The bundled model may not end its answer within the tokens that the engine allows.
    assert ended.returncode == 0 or (not SCRIPTED and "Incomplete response returned" in ended.stdout)
    return ended.stdout


said = codex(f"CALL exec_command {json.dumps({'cmd': 'cat note.txt'})}")
assert ("The tool said: Chunk" in said and "the note says Rome" in said) or not SCRIPTED
codex("hi", resumed=True)
if SCRIPTED:  # the bundled model sees no images
    codex("What is this?", "-i", "dot.png")
said = codex('ANSWER {"name": "Rome"}', "--output-schema", "schema.json", "-o", "last.txt")
assert not SCRIPTED or json.loads(Path("last.txt").read_text()) == {"name": "Rome"}
# Models that it knows get other tools: `apply_patch` with a grammar, or tools in the input instead of in `tools`.
codex(f"CALL apply_patch {json.dumps({'input': PATCH})}", "-m", "gpt-5.5")
assert not SCRIPTED or Path("new.txt").read_text() == "hello\n"
script = 'text((await tools.exec_command({cmd: "cat note.txt"})).output)'
said = codex(f"CALL exec {json.dumps({'input': script})}", "-m", "gpt-6.2-sol")
assert "the note says Rome" in said.split("The tool said:")[-1] or not SCRIPTED
# Its own provider tries a WebSocket first, and must send a POST at once.
login = [f"{os.environ['CLIENT_BINARIES']}/codex", "login", "--with-api-key"]
subprocess.run(login, input=os.environ["OPENAI_API_KEY"], text=True, check=True)
own = ("-c", 'model_provider="openai"', "-c", f'openai_base_url="{os.environ["OPENAI_BASE_URL"]}"', "-m", "gpt-5.5")
said = codex("hi", *own)
assert "Reconnecting" not in said
assert "Hello from the scripted server." in said or not SCRIPTED
