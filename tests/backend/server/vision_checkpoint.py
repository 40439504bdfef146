"""A tiny random Qwen2.5-VL with tokenizer and template, as a server loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.backend.server.conftest import save_tokenizer
from tests.backend.vision_models import CONFIG, build

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# That of Qwen2.5-VL, without videos and the default system message.
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content \
or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}\
{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class VisionCheckpoint:
    path: Path
    model: PreTrainedModel  # of transformers
    image_token: int


def build_vision_checkpoint(directory: Path) -> VisionCheckpoint:
    directory.mkdir()
    save_tokenizer(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(VISION_TOKENS)
    tokenizer.save(path)
    ids = tokenizer.get_vocab()
    model = build(
        directory,
        text_config=CONFIG["text_config"] | {"vocab_size": 520, "max_position_embeddings": 2048, "eos_token_id": 1},
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
    )  # fmt: skip
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return VisionCheckpoint(directory, model, ids["<|image_pad|>"])
