"""The CPU's kernels: C++ in kernels.cpp and kernels/, compiled by the system's compiler, called by ctypes.

It imports nothing from `backend`. Begin at compiler.py for how kernels are compiled, at library.py for how they are
called, at recording.py for how their calls are replayed, and at kernels/operations.h for what they compute.
"""
