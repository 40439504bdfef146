"""Reads the duration of WAV, MP3, FLAC and MP4 (also M4A and MOV) recordings from their headers.

The functions get hostile files. They read a bounded number of bytes and return 0.0 for anything malformed.
"""

from __future__ import annotations

import re
import struct

from gateway.prompts.media.encoded import EncodedFile

CHUNKS_MAX = 64  # of a WAV or MP4 file that are skipped before the one that is needed
SYNC_SEARCH_BYTES = 4_096  # in which the first frame of an MP3 file must begin
SECONDS_MAX = 86_400.0
# The valid values of the third byte of a frame's header. It has a bitrate, neither free nor invalid, and a sample rate.
_RATES = bytes(byte for byte in range(256) if byte >> 4 not in (0, 15) and byte >> 2 & 3 != 3)
_FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][%b]" % re.escape(_RATES), re.DOTALL)  # of layer III
_BITRATES_V1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)  # kbit/s, MPEG 1 layer III
_BITRATES_V2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)  # MPEG 2 and 2.5 layer III
_SAMPLE_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


def recording_seconds(file: EncodedFile) -> float:
    """The duration in seconds, at most `SECONDS_MAX`. 0.0 if the format is unknown or the header is malformed."""
    head = file.read(0, 16)
    try:
        if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
            seconds = _wav_seconds(file)
        elif head[:4] == b"fLaC":
            seconds = _flac_seconds(file)
        elif head[4:8] == b"ftyp":
            seconds = _mp4_seconds(file)
        elif head[:3] == b"ID3" or head[:1] == b"\xff":
            seconds = _mp3_seconds(file, head)
        else:
            return 0.0
    except (struct.error, IndexError, ZeroDivisionError):
        return 0.0
    return min(max(0.0, seconds), SECONDS_MAX)


def _wav_seconds(file: EncodedFile) -> float:
    at, bytes_per_second = 12, 0
    for _ in range(CHUNKS_MAX):
        name, length = struct.unpack("<4sI", file.read(at, 8))
        if name == b"fmt ":
            bytes_per_second = struct.unpack_from("<I", file.read(at + 8, 16), 8)[0]
        elif name == b"data":  # recorders that stream write a length of 0 or 2**32 - 1
            rest = file.size - at - 8
            return (min(length, rest) if length else rest) / bytes_per_second
        at += 8 + length + length % 2
    return 0.0


def _flac_seconds(file: EncodedFile) -> float:
    """The first block, STREAMINFO, has the sample rate (20 bits) and the number of samples (36 bits)."""
    bits = int.from_bytes(file.read(18, 8), "big")
    samples, rate = bits & (1 << 36) - 1, bits >> 44
    return samples / rate


def _mp4_seconds(file: EncodedFile) -> float:
    """Skip from box to box until `mvhd`, which is in `moov` and has the time scale and the duration."""
    at = 0
    for _ in range(CHUNKS_MAX):
        length, name = struct.unpack_from(">I4s", file.read(at, 8))
        head_bytes = 8
        if length == 1:  # a 64-bit length follows
            length, head_bytes = struct.unpack(">Q", file.read(at + 8, 8))[0], 16
        if name == b"moov":
            at += head_bytes
            continue
        if name == b"mvhd":
            fields = file.read(at + head_bytes, 32)
            scale, duration = struct.unpack_from(
                ">IQ" if fields[0] == 1 else ">II", fields, 20 if fields[0] == 1 else 12
            )
            return float(duration / scale)
        if length < head_bytes:
            return 0.0
        at += length
    return 0.0


def _mp3_seconds(file: EncodedFile, head: bytes) -> float:
    """By the number of frames, if the first one tells it (`Xing`, `Info`, `VBRI`), or else by the constant bitrate."""
    at = 0
    if head[:3] == b"ID3":  # seven bits of each byte
        at = 10 + ((head[6] & 127) << 21 | (head[7] & 127) << 14 | (head[8] & 127) << 7 | head[9] & 127)
    data = file.read(at, SYNC_SEARCH_BYTES)
    if (found := _FRAME.search(data)) is None:
        return 0.0
    start = found.start()
    frame = data[start : start + 256]
    version = frame[1] >> 3 & 3
    kbits = (_BITRATES_V1 if version == 3 else _BITRATES_V2)[frame[2] >> 4]
    rate = _SAMPLE_RATES[version][frame[2] >> 2 & 3]
    if frames := _frame_count(frame):
        return frames * (1_152 if version == 3 else 576) / rate
    return (file.size - at - start) * 8 / (kbits * 1_000)


def _frame_count(frame: bytes) -> int:
    for tag in (b"Xing", b"Info"):
        if (at := frame.find(tag)) > 0 and frame[at + 7] & 1:
            return int.from_bytes(frame[at + 8 : at + 12], "big")
    if (at := frame.find(b"VBRI")) > 0:
        return int.from_bytes(frame[at + 14 : at + 18], "big")
    return 0
