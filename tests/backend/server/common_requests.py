"""Fields that the requests of several tests have in common."""

from typing import Any

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, world! " * 20}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}
