"""The bundled demonstration model: its weights, and everything that made them.

`topics.yaml` holds the knowledge, `phrasing.py` the many ways to ask, `corpus.py` makes conversations of both,
`train.py` trains tokenizer and model from scratch, `evaluate.py` measures what came out.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
