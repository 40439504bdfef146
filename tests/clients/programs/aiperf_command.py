"""The command `aiperf`: a profile of eight streamed chats."""

import os
import subprocess

command = [
    f"{os.environ['CLIENT_BINARIES']}/aiperf", "profile", "--model", "m", "--endpoint-type", "chat", "--streaming",
    "--url", os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), "--api-key", os.environ["OPENAI_API_KEY"],
    "--tokenizer", os.environ["TOKENIZER"], "--request-count", "8", "--concurrency", "2",
    "--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "10", "--ui", "none",
]  # fmt: skip
ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(ended.stdout)
assert ended.returncode == 0
