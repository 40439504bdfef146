"""Counts the tokens of images, sound, video and files in a prompt, from their headers and a formula per model family.

`parts.py` recognises media in content parts and makes a `MediaItem` of each: its digest and its size. `encoded.py`
decodes only the bytes of a base64 payload that a header needs. `images.py`, `recordings.py` and `pdf.py` read headers.
`counting.py` turns items into tokens, and into text for the fingerprint. `calibration.py` corrects the formulas by the
usage that replies report. The formulas are in `gateway/policy/media_formulas.py`.

Nothing is fetched: media given by URL or file id have an unknown size, for which each formula states its default.
"""
