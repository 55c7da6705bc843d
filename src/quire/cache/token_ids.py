"""Token ids of a sequence, and the keys of its pages: a page is found by the ids of its tokens and of all tokens before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from operator import index
from typing import Any, NamedTuple

import numpy
import torch

from quire.errors import ArgumentError, describe

KEY_BYTES = 16
_ID_BYTES = 8


class KeyChain(NamedTuple):
    """The keys of the pages of a sequence, as far as they are known.

    The key of a page is the 128-bit BLAKE2b hash of its token ids, salted with the key of the page before it, so equal keys mean
    equal token ids from the first on: a second sequence of ids with a given key takes about 2^128 attempts to find."""

    root: bytes
    """The key before the first page: a hash of the salt."""
    keys: tuple[bytes, ...] = ()
    """The keys of the pages, from the first on."""
    digest: bytes | None = None
    """A hash of the token ids of all these pages, if it is known: it is computed faster than the keys."""

    @classmethod
    def begin(cls, salt: object) -> KeyChain:
        if not isinstance(salt, str):
            raise ArgumentError("salt", describe(salt), "a str")
        try:
            encoded = salt.encode()
        except UnicodeEncodeError:
            raise ArgumentError("salt", describe(salt), "a str without lone surrogates, which UTF-8 can encode") from None
        return cls(blake2b(encoded, digest_size=KEY_BYTES).digest())

    @property
    def pages(self) -> int:
        """Number of pages, from the first on, that have keys."""
        return len(self.keys)

    @property
    def key(self) -> bytes:
        """The key of the last of them; `root` if there are none."""
        return self.keys[-1] if self.keys else self.root

    def upto(self, pages: int) -> KeyChain:
        """The chain after pages from number `pages` on lost their tokens."""
        return self if pages >= self.pages else KeyChain(self.root, self.keys[:pages])

    def first_difference(self, ids: TokenIds, page_size: int) -> int | None:
        """The first of these pages that has other token ids; None if there is none."""
        known = min(self.pages, len(ids) // page_size)
        if known == self.pages and self.digest is not None and ids.digest(page_size, known) == self.digest:
            return None
        found = ids.keys(page_size, 0, known, self.root)
        return next((i for i, (key, mine) in enumerate(zip(found, self.keys)) if key != mine), None)


NO_SALT = KeyChain.begin("")
_INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64)


class TokenIds:
    """The argument `token_ids`, validated: ints of 64 bits, in a list, a tuple, a numpy array or a torch tensor in host memory."""

    def __init__(self, given: Any):
        values = given.numpy() if isinstance(given, torch.Tensor) and _is_readable(given) else given
        if isinstance(values, numpy.ndarray):
            allowed = values.ndim == 1 and numpy.can_cast(values.dtype, numpy.int64) and values.dtype != bool
        else:
            allowed = isinstance(values, (list, tuple))
        if not allowed:
            negated = "a view with the negative bit, " if isinstance(given, torch.Tensor) and given.is_neg() else ""
            raise _refusal(negated + describe(given))
        self._data = memoryview(values.astype(numpy.int64).tobytes() if isinstance(values, numpy.ndarray) else _packed(values))
        self._hash, self._hashed = blake2b(digest_size=KEY_BYTES), 0

    def __len__(self) -> int:
        return len(self._data) // _ID_BYTES

    def keys(self, page_size: int, first: int, end: int, before: bytes) -> Iterator[bytes]:
        """The keys of pages `[first, end)`; `before` is the key of the page before the first."""
        data, size, key = self._data, page_size * _ID_BYTES, before
        for at in range(first * size, end * size, size):
            key = blake2b(data[at : at + size], digest_size=KEY_BYTES, salt=key).digest()
            yield key

    def digest(self, page_size: int, pages: int) -> bytes:
        """A hash of the ids of the first pages. A call for more of them continues the one before."""
        end = pages * page_size * _ID_BYTES
        if end < self._hashed:
            self._hash, self._hashed = blake2b(digest_size=KEY_BYTES), 0
        self._hash.update(self._data[self._hashed : end])
        self._hashed = end
        return self._hash.digest()


def _is_readable(given: torch.Tensor) -> bool:
    """Whether a tensor has integers in host memory."""
    on_host = given.device.type == "cpu" and given.layout is torch.strided
    return on_host and given.dtype in _INTEGERS and not given.is_neg()


def _packed(given: list[Any] | tuple[Any, ...]) -> bytes:
    """The bytes of ids. Only 0 and 1 can be bools, so only these are looked at again."""
    try:
        packed = array("q", given)
    except (TypeError, OverflowError):
        bad = next(i for i, id in enumerate(given) if not _is_id(id))
        raise _refusal(f"{describe(given[bad])} at index {bad}") from None
    values = numpy.frombuffer(packed, dtype=numpy.int64)
    for i in numpy.flatnonzero((values >> 1) == 0).tolist():
        if isinstance(given[i], bool):
            raise _refusal(f"{given[i]} at index {i}")
    return packed.tobytes()


def _is_id(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and -(2**63) <= index(value) < 2**63
    except TypeError:
        return False


def _refusal(given: str) -> ArgumentError:
    return ArgumentError("token_ids", given, "ints of 64 bits: a list, a tuple, or one axis of a numpy array or a CPU tensor")
