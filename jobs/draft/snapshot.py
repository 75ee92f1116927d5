"""A moment of training on its way to the disk, while training goes on.

Decisions:
* The moment is held by a copy on the tensors' own device: 14.3 GB of a head of 1.19 billion parameters
  (weights and two moments in fp32) take about 8 ms within an H200's memory, but 0.3 to 0.6 s over PCIe
  into pinned memory and seconds into memory that is not, and no step may change them meanwhile. Where
  the device has no room beside the largest step so far, the copy goes to the host at once.
* From the device it goes through one pinned buffer of `BLOCK` bytes on a stream of its own, straight
  into the file and its checksum. The host needs no memory for it.
* Not by `safetensors.torch.save_file`: it puts the whole file together as Python bytes and holds the
  interpreter's lock over it (0.65 s for 512 MB), in which the training thread can launch nothing.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from jobs.storage.files import write_all

BLOCK = 32 << 20  # bytes
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}  # safetensors' own
SAFETY = 0.8  # of the room that is left at a step's peak


def place_for(device: torch.device, needed: int) -> torch.device:
    """Where copies of `needed` bytes are held: on the device, or on the host where that has no room for them."""
    if device.type != "cuda":
        return device
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return device if needed < SAFETY * (free + idle) else torch.device("cpu")


def apart(tensors: Mapping[str, Tensor], place: torch.device) -> dict[str, Tensor]:
    """Copies at `place`, into which training does not write."""
    return {name: tensor.detach().to(place, copy=True) for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file, fsynced; tensors may lie on a device. Returns the xxh3 of its bytes."""
    # The widest types first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file:
        for block in _blocks(struct.pack("<Q", len(text)) + text, [tensor for _, tensor in ordered]):
            write_all(file.fileno(), block)
            digest.update(block)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _blocks(header: bytes, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of the file on the host, at most BLOCK at a time; each is good until the next is asked for."""
    yield memoryview(header)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    pinned = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) if devices else None
    streams = {device: torch.cuda.Stream(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.default_stream(device))  # where training makes its copies
    for tensor in tensors:
        for block in tensor.contiguous().view(-1).view(torch.uint8).split(BLOCK):
            if tensor.device in streams:
                block = _on_host(block, pinned[: len(block)], streams[tensor.device])
            yield memoryview(block.numpy())


def _on_host(block: Tensor, pinned: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Copied into pinned memory; only this thread waits for it."""
    with torch.cuda.stream(stream):
        pinned.copy_(block, non_blocking=True)
    stream.synchronize()
    return pinned
