"""The identity of an adapter: what requests, block hashes and KV events need to know about it. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter, which changes what the model computes for the requests that name it.

    Requests refer to the object itself, so its memory is freed when it is unloaded and its last request has ended.
    """

    name: str
    number: int  # counts from 1; vLLM's `lora_int_id`
    digest: bytes  # of the adapter's files

    @property
    def root_hash(self) -> bytes:
        """The parent of a sequence's first block: blocks of different adapters, or of none, never have equal hashes.

        An adapter that is loaded again finds its blocks again. Another adapter under the same name does not.
        """
        return sha256(b"lora " + self.digest + self.name.encode()).digest()
