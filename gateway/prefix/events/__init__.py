"""KV events: what engines publish about the blocks in their prefix caches.

`base.py` is the port. `zmq.py` (with `wire.py`) and `trtllm.py` are the sources. `block_index.py` finds out which
prompt's text the blocks hold, and corrects the deployment's cache model.
"""
