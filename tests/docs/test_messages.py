"""docs/reference/messages.md against the types of the endpoint."""

from __future__ import annotations

import msgspec

from gateway.endpoints.messages import blocks
from gateway.endpoints.messages.request import MessagesBody
from tests.docs.markdown import ROOT, code_spans, section, table_rows

PAGE = ROOT / "docs" / "reference" / "messages.md"
SELF_EVIDENT = {"model", "messages"}


def documented() -> set[str]:
    rows = table_rows(section(PAGE, "How requests are translated"))
    spans = {span for row in rows for span in code_spans(row[0])}
    return {word for span in spans for word in (span, span.partition(".")[0], span.partition(":")[0])}


def test_every_accepted_field_and_block_is_in_the_table() -> None:
    fields = {field.name for field in msgspec.structs.fields(MessagesBody)}
    tags = {kind.__struct_config__.tag for kind in blocks.Block.__subclasses__()}
    assert fields - SELF_EVIDENT | tags <= documented()
