"""The bundled demo model: its weights, and the programs and texts that produced them.

Only its tests and a benchmark import this package; it imports no other package of the engine.
Begin at `corpus.py`, which generates conversations from `topics.yaml` and `phrasing.py`; `train.py` trains tokenizer
and model from scratch, and `evaluate.py` measures the result.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
