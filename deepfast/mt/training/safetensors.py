"""Writes tensors in the format safetensors, which needs no package to write.

8 bytes: the size of the header, little-endian; the header, JSON; the tensors one after the other.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from deepfast.mt.data.text import write_atomically

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save_safetensors(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Write tensors and metadata; even after a crash `path` is the old file or the new one."""
    header: dict[str, object] = {"__metadata__": metadata}
    parts, end = [], 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, end]}  # fmt: skip
        # numpy is not a dependency.
        parts.append(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")
    text = json.dumps(header).encode()
    # The tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    write_atomically(Path(path), b"".join([len(text).to_bytes(8, "little"), text, *parts]))
