"""Images of requests: where they come from, and their pixels in the size that the model reads.

Begin at `decoding.py`. `structure.py` rejects files that would take a decoder much longer than their size says.
`fetching.py` downloads images from hosts that the operator has named. Everything here works on hostile input and is
bounded in bytes, pixels and time. This package imports no other one.
"""
