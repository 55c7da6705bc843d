"""Token ids of a sequence, and the keys of its pages: a page is found by the ids of its tokens and of all tokens before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy
import torch

from quire.errors import ArgumentError, describe

KEY_BYTES = 16
_ID_BYTES = 8


class KeyChain(NamedTuple):
    """How far the pages of a sequence have keys.

    The key of a page is the 128-bit BLAKE2b hash of its token ids, salted with the key of the page before it, so equal keys mean
    equal token ids from the first on: a second sequence of ids with a given key takes about 2^128 attempts to find."""

    root: bytes
    """The key before the first page: a hash of the salt."""
    pages: int
    """Number of pages, from the first on, that have keys."""
    key: bytes
    """The key of the last of them; `root` if there are none."""

    @classmethod
    def begin(cls, salt: object) -> KeyChain:
        if not isinstance(salt, str):
            raise ArgumentError("salt", describe(salt), "a str")
        root = blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        return cls(root, 0, root)

    def upto(self, pages: int) -> KeyChain:
        """The chain after pages from number `pages` on lost their tokens."""
        return self if pages >= self.pages else KeyChain(self.root, 0, self.root)


NO_SALT = KeyChain.begin("")


class TokenIds:
    """The argument `token_ids`, validated: ints of 64 bits, in a list, a tuple, a numpy array or a torch tensor in host memory."""

    def __init__(self, given: Any):
        self._given = given
        if isinstance(given, torch.Tensor) and given.device.type == "cpu" and given.layout is torch.strided:
            self._given = given.detach().numpy()
        if isinstance(self._given, numpy.ndarray):
            allowed = self._given.ndim == 1 and numpy.can_cast(self._given.dtype, numpy.int64) and self._given.dtype != bool
        else:
            allowed = isinstance(given, (list, tuple))
        if not allowed:
            raise self._refusal(describe(given))

    def __len__(self) -> int:
        return len(self._given)

    def keys(self, page_size: int, first: int, end: int, before: bytes) -> Iterator[bytes]:
        """The keys of pages `[first, end)`; `before` is the key of the page before the first."""
        data, size, key = self._bytes(first * page_size, end * page_size), page_size * _ID_BYTES, before
        for at in range(0, len(data), size):
            key = blake2b(data[at : at + size], digest_size=KEY_BYTES, salt=key).digest()
            yield key

    def _bytes(self, first: int, end: int) -> memoryview:
        part = self._given[first:end]
        if isinstance(part, numpy.ndarray):
            return memoryview(part.astype(numpy.int64).tobytes())
        try:
            return memoryview(array("q", part)).cast("B")
        except (TypeError, OverflowError):
            bad = next(i for i, id in enumerate(part) if not isinstance(id, int) or not -(2**63) <= id < 2**63)
            raise self._refusal(f"{describe(part[bad])} at index {first + bad}") from None

    def _refusal(self, given: str) -> ArgumentError:
        return ArgumentError("token_ids", given, "ints of 64 bits: a list, a tuple, or one axis of a numpy array or a CPU tensor")
