"""The doors by path behind /v1/."""

from gateway.doors.base import Door
from gateway.doors.chat import ChatDoor
from gateway.doors.completions import CompletionDoor
from gateway.doors.embeddings import EmbeddingDoor
from gateway.doors.messages import CountTokensDoor, MessagesDoor
from gateway.doors.responses import InputTokensDoor, ResponsesDoor

# Those that the lines of batches may name.
BATCH_DOORS: tuple[Door, ...] = (ChatDoor(), CompletionDoor(), EmbeddingDoor(), ResponsesDoor())
DOORS: tuple[Door, ...] = (*BATCH_DOORS, MessagesDoor())
COUNTING_DOORS: tuple[Door, ...] = (CountTokensDoor(), InputTokensDoor())  # where prompts are only counted

__all__ = ["BATCH_DOORS", "COUNTING_DOORS", "DOORS"]
