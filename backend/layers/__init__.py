"""Layers that the models are built from: attention, MLPs, norms and rotary embeddings, with their weights.

This package imports `attention`, `kv_cache`, `ops`, `quantization`, `model_files` and the configuration in `models`.
Begin at `forward_context.py`, which defines the inputs of a layer in each step, then read `loader.py`, which creates
layers from a checkpoint.
"""
