"""P3: one date for templates that print today's.

The templates of Llama 3.1 and its kin print `date_string` into the first lines of every prompt and take today's where
it is not given, so that at midnight everything becomes cold. With this, `chat_template_kwargs.date_string` is the date
that the policy names, unless the client has given one. Only for servers that know `chat_template_kwargs`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.prompts.transforms.base import Safety, TransformContext, ValueTransform

_object = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_encode = msgspec.json.encode


class TemplateDate(ValueTransform):
    name: ClassVar[str] = "template_date"
    safety: ClassVar[Safety] = Safety.P3
    fields: ClassVar[tuple[str, ...]] = ("chat_template_kwargs",)

    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        try:
            given = _object.decode(raw) or {}
        except msgspec.MsgspecError:  # no object: the server is to refuse it
            return None
        if "date_string" in given or context.plan.template_date is None:
            return None
        return _encode({**given, "date_string": msgspec.Raw(_encode(context.plan.template_date))})
