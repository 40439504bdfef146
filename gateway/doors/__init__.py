"""The doors by path behind /v1/."""

from gateway.doors.base import Door
from gateway.doors.chat import ChatDoor
from gateway.doors.completions import CompletionDoor
from gateway.doors.embeddings import EmbeddingDoor
from gateway.doors.messages import CountTokensDoor, MessagesDoor
from gateway.doors.responses import ResponsesDoor

BATCH_DOORS: tuple[Door, ...] = (
    ChatDoor(),
    CompletionDoor(),
    EmbeddingDoor(),
    ResponsesDoor(),
)  # for the lines of batches, too
DOORS: tuple[Door, ...] = (*BATCH_DOORS, MessagesDoor())
COUNTING_DOORS: tuple[Door, ...] = (CountTokensDoor(),)  # where prompts are only counted

__all__ = ["BATCH_DOORS", "COUNTING_DOORS", "DOORS"]
