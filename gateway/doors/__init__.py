"""The doors by path behind /v1/."""

from gateway.doors.base import Door
from gateway.doors.chat import ChatDoor
from gateway.doors.completions import CompletionDoor
from gateway.doors.embeddings import EmbeddingDoor

DOORS: tuple[Door, ...] = (ChatDoor(), CompletionDoor(), EmbeddingDoor())

__all__ = ["DOORS"]
