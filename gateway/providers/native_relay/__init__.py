"""Relays the texts of running streams in native code, without a Python object for each chunk.

`relay` decides which streams native code passes on, and takes them back. `relay.c` passes them on. `compiler` compiles
it when Warmpath is installed, and finds the library. Without it, `DirectText` (`gateway.providers.text_events`) does
the same work in Python.
"""
