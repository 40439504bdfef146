"""History of policies: each policy that was in force, by its hash, so that the price of every receipt can be checked.

    <folder>/<hash>.json    the policy as JSON, with all defaults; `hash` is the beginning of the SHA-256 of the file

A receipt has the hash of its policy. A file whose content does not match its name is not used. Files are never changed
or deleted. They contain the hashes of API keys, so only the gateway's user may read them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pydantic import ValidationError

from gateway.policy.policy import HASH_DIGITS, Policy


class NotInHistory(Exception):
    """A policy is not in the history, or its file was changed. The message names the file."""


def record(policy: Policy, folder: Path) -> Path:
    """Write a policy to the history, unless it is there. Returns its file. Raises `OSError`."""
    file = folder / f"{policy.hash}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = folder / f".{policy.hash}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as content:
            content.write(policy.model_dump_json(by_alias=True).encode())
        temporary.replace(file)
    return file


def load(policy_hash: str, folder: Path) -> Policy:
    """Read a policy of the history. Raises `NotInHistory`."""
    file = folder / f"{policy_hash}.json"
    try:
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest()[:HASH_DIGITS] != policy_hash:
            raise NotInHistory(f"{file}: was changed: its content does not match its name")
        return Policy.model_validate_json(content)
    except OSError as error:
        raise NotInHistory(f"{file}: {error.strerror}") from None
    except ValidationError as error:
        raise NotInHistory(f"{file}: is no policy for this version ({error.error_count()} problems)") from None
