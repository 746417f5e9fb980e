"""Bodies of calls as differences against an earlier call of the same attempt.

A harness sends its whole history again with every call, so consecutive requests share a long prefix (and often a long
suffix, the tools). What is stored is the middle between the two, compressed; a large middle is compressed with the
base's own middle as dictionary, which finds what has moved. Every `KEYFRAME_EVERY` links a body is stored whole.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import zstandard

from canter.types import Call, CallBodies

KEYFRAME_EVERY = 64
"""Links after which bodies are stored whole again: the most that one read has to undo."""

_HEADER = struct.Struct("<BII")  # codec, bytes shared with the base at its start, and at its end
_RAW, _ZSTD, _ZSTD_WITH_BASE = range(3)
_COMPRESS_FROM = 128
_DICTIONARY_FROM = 4096


def encode(body: bytes, base: bytes, compressor: zstandard.ZstdCompressor) -> bytes:
    """What `decode` needs to make `body` from `base` (empty: a keyframe)."""
    prefix, suffix = common_ends(body, base)
    middle = memoryview(body)[prefix : len(body) - suffix]
    base_middle = memoryview(base)[prefix : len(base) - suffix]
    codec, payload = _RAW, bytes(middle)
    if len(middle) >= _COMPRESS_FROM:
        if len(middle) >= _DICTIONARY_FROM and len(base_middle) >= _DICTIONARY_FROM:
            codec, squeezed = _ZSTD_WITH_BASE, _compress_against(middle, base_middle)
        else:
            codec, squeezed = _ZSTD, compressor.compress(middle)
        codec, payload = (codec, squeezed) if len(squeezed) < len(middle) else (_RAW, payload)
    return _HEADER.pack(codec, prefix, suffix) + payload


def decode(data: bytes, base: bytes) -> bytes:
    """Inverse of `encode`."""
    codec, prefix, suffix = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    end = len(base) - suffix
    if codec == _ZSTD:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    elif codec == _ZSTD_WITH_BASE:
        payload = zstandard.ZstdDecompressor(_dictionary(base[prefix:end])).decompress(payload)
    return b"".join((base[:prefix], payload, base[end:]))


def common_ends(a: bytes, b: bytes) -> tuple[int, int]:
    """How many bytes `a` and `b` share at the start, and how many of the rest at the end."""
    if not a or not b:
        return 0, 0
    x, y = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    n = min(len(x), len(y))
    prefix = _equal_run(x[:n] != y[:n])
    left = n - prefix
    return prefix, _equal_run((x[len(x) - left :] != y[len(y) - left :])[::-1]) if left else 0


def _equal_run(differs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    first = int(differs.argmax())
    return first if differs[first] else len(differs)


def _dictionary(base: bytes | memoryview) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(bytes(base), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _compress_against(data: memoryview, base: memoryview) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, source_size=len(data), dict_size=len(base))
    squeezed: bytes = zstandard.ZstdCompressor(dict_data=_dictionary(base), compression_params=parameters).compress(
        data
    )
    return squeezed


@dataclass(frozen=True, slots=True)
class Head:
    """The last call of a conversation, which the next one can be stored against. `depth` counts links to a keyframe."""

    call_id: str
    seq: int
    depth: int
    bodies: CallBodies

    @property
    def size(self) -> int:
        return len(self.bodies.request) + len(self.bodies.reply)


class Heads:
    """The heads of the attempts that call now: up to `PER_ATTEMPT` each (conversations run side by side), the least
    recently used attempts forgotten beyond `max_bytes` of bodies."""

    PER_ATTEMPT = 4

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._attempts: OrderedDict[tuple[str, int], dict[str, Head]] = OrderedDict()
        self._bytes = 0

    @property
    def size(self) -> int:
        """Bytes of bodies that are held."""
        return self._bytes

    def base(self, call: Call, request: bytes) -> Head | None:
        """The head to store `call` against: its parent's, else the one whose request is most alike; `None` where there
        is none."""
        heads = self._attempts.get((call.rollout_id, call.attempt))
        if not heads:
            return None
        head = heads.get(call.parent_id) if call.parent_id else None
        if head is None:
            head = max(heads.values(), key=lambda h: sum(common_ends(request, h.bodies.request)))
        return head

    def push(self, call: Call, head: Head, base: Head | None) -> None:
        """Makes `head` that of `call`; it takes the place of `base` where it goes on from there."""
        key = (call.rollout_id, call.attempt)
        heads = self._attempts.setdefault(key, {})
        self._attempts.move_to_end(key)
        if base is not None and (base.call_id == call.parent_id or _continues(head, base)):
            self._drop(heads, base.call_id)
        elif len(heads) >= self.PER_ATTEMPT:
            self._drop(heads, next(iter(heads)))
        heads[head.call_id] = head
        self._bytes += head.size
        while self._bytes > self._max_bytes:
            _, forgotten = self._attempts.popitem(last=False)
            self._bytes -= sum(h.size for h in forgotten.values())

    def clear(self) -> None:
        self._attempts.clear()
        self._bytes = 0

    def _drop(self, heads: dict[str, Head], call_id: str) -> None:
        if (head := heads.pop(call_id, None)) is not None:
            self._bytes -= head.size


def _continues(head: Head, base: Head) -> bool:
    """Whether most of the base's request is in the head's again."""
    return 2 * sum(common_ends(head.bodies.request, base.bodies.request)) >= len(base.bodies.request)
