"""P3 transform `template_date`: a fixed date for chat templates that print today's date.

The templates of Llama 3.1 and similar models print `date_string` at the beginning of every prompt, and use today's date
if it is not given. So at midnight no prompt is cached any more. This sets `chat_template_kwargs.date_string` to the
policy's date, unless the client has set it. Only for deployments that support `chat_template_kwargs`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.prompts.transforms.base import Safety, TransformContext, ValueTransform

_object = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_encode = msgspec.json.encode


class TemplateDate(ValueTransform):
    """Sets the date that chat templates print."""

    name: ClassVar[str] = "template_date"
    safety: ClassVar[Safety] = Safety.P3
    fields: ClassVar[tuple[str, ...]] = ("chat_template_kwargs",)

    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        try:
            given = _object.decode(raw) or {}
        except msgspec.MsgspecError:  # not an object: the deployment refuses it
            return None
        if "date_string" in given or context.plan.template_date is None:
            return None
        return _encode({**given, "date_string": msgspec.Raw(_encode(context.plan.template_date))})
