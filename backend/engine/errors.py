"""What the engine refuses, and how it fails.

EngineError
├── RequestRefused      this request can never be served; `param` names the field at fault
│   └── ContextTooLong  prompt and max_tokens exceed the model's or the configured context
├── QueueFull           too many unfinished requests; try again later
├── EngineDead          the engine is not running: never started, stopped, or ended by an error
├── ConfigError         a configuration that cannot work; `param` names the field
├── UnsupportedModel    the checkpoint asks for something that no model here implements
├── WeightsError        the checkpoint's tensors are not the ones that the model needs
└── IntegrityError      the block pool contradicts itself: a bug, and never safe to go on from
"""

from __future__ import annotations


class EngineError(Exception):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestRefused(EngineError):
    pass


class ContextTooLong(RequestRefused):
    pass


class QueueFull(EngineError):
    pass


class EngineDead(EngineError):
    pass


class ConfigError(EngineError):
    pass


class UnsupportedModel(EngineError):
    pass


class WeightsError(EngineError):
    pass


class IntegrityError(EngineError):
    pass
