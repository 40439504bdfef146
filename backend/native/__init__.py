"""The CPU's own kernels: one C++ file, compiled by the system's compiler on first use."""
