"""The doors by path behind /v1/."""

from gateway.endpoints.base import Door
from gateway.endpoints.chat import ChatDoor
from gateway.endpoints.completions import CompletionDoor
from gateway.endpoints.embeddings import EmbeddingDoor
from gateway.endpoints.messages import CountTokensDoor, MessagesDoor
from gateway.endpoints.responses import InputTokensDoor, ResponsesDoor

# Those that the lines of batches may name.
BATCH_DOORS: tuple[Door, ...] = (ChatDoor(), CompletionDoor(), EmbeddingDoor(), ResponsesDoor())
DOORS: tuple[Door, ...] = (*BATCH_DOORS, MessagesDoor())
COUNTING_DOORS: tuple[Door, ...] = (CountTokensDoor(), InputTokensDoor())  # where prompts are only counted

__all__ = ["BATCH_DOORS", "COUNTING_DOORS", "DOORS"]
