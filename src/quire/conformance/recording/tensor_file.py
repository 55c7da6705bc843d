"""Tensors and metadata in one safetensors file. The metadata is JSON in the entry "quire" of the file's own metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quire.errors import ArgumentError, QuireError

_ALLOWED = "a file that quire.record wrote"


def save(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """Writes the tensors and the metadata. The file appears complete, or not at all."""
    _require_safetensors()
    from safetensors.torch import save_file

    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, part, {"format": "pt", "quire": json.dumps(metadata)})
    part.replace(path)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file that `save` wrote."""
    _require_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt", device="cpu") as file:
            metadata = json.loads(file.metadata()["quire"])
            # A copy: the file may be written again while the tensors are in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        # Files of earlier releases hold 8-bit floats as bytes and name their types here.
        for name, dtype in metadata.pop("float8", {}).items():
            tensors[name] = tensors[name].view(getattr(torch, dtype.removeprefix("torch.")))
    except OSError as error:
        raise ArgumentError("FILE", f"{path} ({error.strerror or error})", _ALLOWED) from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise ArgumentError("FILE", f"{path}, which is incomplete or another kind of file", _ALLOWED) from None
    return tensors, metadata


def _require_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise QuireError("recorded calls are safetensors files: install the package safetensors") from None
