"""Prompt prefixes: fingerprints, a model of each deployment's prefix cache, KV events, and the working set.

It may import `policy`, `types` and `core`. `fingerprint.py` names the prefixes of a prompt. `cache_model.py` predicts
which of them a deployment has cached (`cache_slots.py` for llama.cpp). `estimate.py` adds speed and load: begin there.
`events/` and `engine_load.py` read what engines report. `token_calibration.py` converts text blocks to engine tokens.
`working_set.py` decides which conversations may run so that their prefixes stay cached.
"""
