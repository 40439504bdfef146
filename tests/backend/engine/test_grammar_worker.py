"""A worker whose engine is killed while the worker starts ends without a stack trace in the engine's log."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.engine import grammar_worker as worker


def vocabulary() -> bytes:
    """What START sends: a token for each byte, and an end of sequence."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return json.dumps({"tokenizer": tokenizer.to_str(), "size": 257, "eos": [256]}).encode()


VOCABULARY = vocabulary()
START = worker.CONTROL.pack(worker.START, len(VOCABULARY))


@pytest.mark.parametrize("sent", [b"", START[:2], START + VOCABULARY[:9], START + VOCABULARY])
def test_an_engine_that_ends_during_the_start(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", worker.__name__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    ours.sendall(sent)
    ours.close()
    _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (0, b"")
