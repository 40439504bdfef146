"""The engine's exceptions.

EngineError
├── RequestRefused      the request can never be served; `param` names the invalid field
│   └── ContextTooLong  prompt and max_tokens exceed the model's or the configured context
├── QueueFull           too many unfinished requests; try again later
├── EngineDead          the engine is not running: never started, stopped, or ended by an error
├── ConfigError         the configuration cannot work; `param` names the field
├── UnsupportedModel    the checkpoint needs something that no model here implements
├── RankFailed          a process of tensor parallelism has ended, and the engine with it
├── WeightsError        the checkpoint's tensors are not those that the model needs
└── IntegrityError      the block pool is inconsistent: a bug, and never safe to continue after
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class. `message` is for the caller; `param` is the name of the field at fault, if there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestRefused(EngineError):
    """The request can never be served."""


class ContextTooLong(RequestRefused):
    """Prompt and max_tokens exceed the context."""


class QueueFull(EngineError):
    """Too many unfinished requests."""


class EngineDead(EngineError):
    """The engine is not running."""


class ConfigError(EngineError):
    """The configuration cannot work."""


class UnsupportedModel(EngineError):
    """No model here implements the checkpoint."""


class RankFailed(EngineError):
    """Another process of the engine has ended, or does not answer."""


class WeightsError(EngineError):
    """The checkpoint's tensors do not fit the model."""


class AdapterError(EngineError):
    """An adapter cannot be loaded. The message names the file and the field or tensor at fault."""


class IntegrityError(EngineError):
    """The block pool is inconsistent."""
