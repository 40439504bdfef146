"""Tensor parallelism: one model on several devices, `--tensor-parallel-size N`.

N processes, the ranks, each hold a part of every matrix, and together compute each step. Rank 0 is the process of the
server. It alone has requests, scheduler, block pool, sampler and HTTP. The other ranks, the followers, only repeat its
forward passes on their parts.

    rank 0 (leader.py)                                      rank 1 ... N - 1 (follower.py)
    starts the followers (processes.py)
    loads its part of the weights (shards.py)               load their parts
    PagedModel.forward:
      announces the step, in a few bytes  ----socket----->  wait for the next message
      broadcasts the batch's tensors      ----group------>  receive them (wire.py)
      runs the layers                     <---group------>  run the layers
    PagedModel.logits:
      announces it                        ----socket----->
      computes its rows of the head       <---group------>  compute their rows
    a captured step (captures.py):
      announces its number                ----socket----->
      replays its graph                   <---group------>  replay their graphs

* **What is divided** (shards.py): each rank has some of the attention heads with their part of the KV cache, a part of
  the width of every MLP and expert, and a part of the vocabulary. If there are fewer key and value heads than ranks,
  several ranks have the same one. A rank's model is built by the usual classes from a configuration with these sizes.
* **What is exchanged** (division.py): after each attention and each MLP, the ranks add up their results (all-reduce),
  so that all have the same hidden states. The embedding is a sum too, and logits are collected. The group is NCCL on
  GPUs and gloo on CPUs (group.py). Sums of parts have another order than one sum, so the last bits of logits differ
  from those of one process.
* **Block tables and slots are the same on all ranks**, so prefix caching, preemption and chunked prefill need nothing
  else.
* **Faults** (processes.py): a rank that ends for any reason ends the engine with an error that names it. Waits are
  bounded by START_SECONDS, LOAD_SECONDS, SEND_SECONDS and COLLECTIVE_SECONDS. A follower ends when rank 0 ends, however
  that ends.

To add a form of weights, add a rule to shards.py. limits.py lists the options that do not work with several ranks. This
package imports `engine.paged_model` and the layers. `engine.config` imports its limits, and `engine.paged_model` loads
`leader.py` by name.
"""
