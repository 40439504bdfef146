"""History of policies: each policy that was in force, by its hash, so that the price of every receipt can be checked.

    <folder>/<hash>.json    the policy as JSON, with all defaults; `hash` is the beginning of the SHA-256 of the file

A receipt has the hash of its policy. A file whose content does not match its name is not used. Files are never changed
or deleted; the time of a file is when its policy last took effect. They contain the hashes of API keys, so only the
gateway's user may read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from pydantic import ValidationError

from gateway.policy.policy import HASH_DIGITS, Policy

FILES_READ_MAX = 5  # in search of a previous policy that can be read


class NotInHistory(Exception):
    """A policy is not in the history, or its file was changed. The message names the file."""


def record(policy: Policy, folder: Path) -> Path:
    """Write a policy that takes effect to the history, unless it is there. Returns its file. Raises `OSError`."""
    file = folder / f"{policy.hash}.json"
    if file.exists():
        os.utime(file)
    else:
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


def previous(policy_hash: str, folder: Path) -> Policy | None:
    """The policy that was in force before this one; None if there is none that this version can read."""
    times: list[tuple[float, str]] = []
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            times.append((file.stat().st_mtime, file.stem))
    for _, name in sorted(times, reverse=True)[: FILES_READ_MAX + 1]:
        if name != policy_hash:
            with contextlib.suppress(NotInHistory):
                return load(name, folder)
    return None
