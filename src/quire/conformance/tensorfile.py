"""Tensors in a file, in the safetensors format: eight bytes that say how long the header is, the header in JSON, then the bytes.

Written here in a screen, so that recording a bug on somebody's machine needs no further package there. Anything that reads
safetensors reads these files. One-byte floats are stored as bytes, since not every reader knows all of them; a name says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quire.errors import ArgumentError

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_FLOAT8 = {str(dtype): dtype for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)}


def save(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any]) -> None:
    """Writes the tensors and, as JSON in the header, the notes. The file is there whole, or not at all."""
    header: dict[str, Any] = {}
    kept, at, float8 = [], 0, {}
    # The larger types first: every tensor then begins at a multiple of its element's size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if str(tensor.dtype) in _FLOAT8:
            float8[name] = str(tensor.dtype)
            tensor = tensor.contiguous().view(torch.uint8)
        if tensor.dtype not in _NAMES:
            raise ArgumentError(name, tensor.dtype, ", ".join(map(str, (*_NAMES, *_FLOAT8.values()))))
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        kept.append(tensor)
        at += size
    header["__metadata__"] = {"format": "pt", "quire": json.dumps({**notes, "float8": float8})}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in kept:
            data = tensor.detach().cpu().flatten()
            file.write(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    part.replace(path)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the notes of a file that `save` wrote."""
    try:
        raw = bytearray(Path(path).read_bytes())
    except OSError as error:
        raise ArgumentError("FILE", f"{path} ({error.strerror})", "a file that quire.record wrote") from None
    try:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        notes = json.loads(header.pop("__metadata__")["quire"])
        if header and max(entry["data_offsets"][1] for entry in header.values()) + 8 + length > len(raw):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ArgumentError("FILE", f"{path}, which is something else or cut short", "a file that quire.record wrote") from None
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        dtype = _TYPES[entry["dtype"]]
        if start == end:
            tensors[name] = torch.zeros(entry["shape"], dtype=dtype, device="cpu")
        else:
            tensors[name] = (
                torch.frombuffer(raw, dtype=torch.uint8, count=end - start, offset=start).view(dtype).view(entry["shape"])
            )
        if name in notes["float8"]:
            tensors[name] = tensors[name].view(_FLOAT8[notes["float8"][name]])
    return tensors, notes
