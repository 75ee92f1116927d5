"""Hidden-state rows in shard files: the layout, the header, encoding, reading in place.

Decision: a shard is a safetensors file whose header is written once, for a fixed capacity of R rows,
and whose data area is a hole of the file until rows are written. So the file is valid at every
moment for any safetensors reader, writing a row is one `pwrite` per tensor at a computed place, and
a crash can never leave a header that does not fit its data. Which rows mean something says the
index, never the shard.

Tensors of a shard, in file order (fp32 first, so that every tensor is aligned to its element):

    logprob      [R]        fp32   raw log-probability of the next token
    taps_scale   [R, T]     fp32   only FP8: dequantized = stored * scale
    final_scale  [R]        fp32   only FP8
    taps         [R, T, H]  layout.dtype
    final        [R, H]     layout.dtype   after the verifier's last RMSNorm

Data is written with pwrite and read through a private memory map: a full disk is then an error code
at the write, not a SIGBUS at some later touch of a page.
"""

import dataclasses
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from jobs.errors import JobError, MustFix
from jobs.storage.files import disk_full_named, fsync_folder, read_json, write_all, write_json_atomically

VERSION = 1
STORE = "store.json"
FORMAT = "eagle3-states"
HEADER_ALIGNMENT = 4096  # bytes: the data area starts on a page
FP8_LARGEST = 448.0  # largest finite float8_e4m3fn
MAP_NORESERVE = 0x4000  # Linux on x86 and arm; in Python's mmap only from 3.13

_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
_TORCH_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}

Rows = dict[str, Tensor]  # tensor name -> [r, ...] of one extent, encoded as stored
RawRows = dict[str, list[np.ndarray]]  # the same as bytes: tensor name -> pieces [r, bytes of a row] that follow each other
QUANTIZED_AT_ONCE = 1024  # rows: their fp32 copies are held for a moment, on a GPU beside the verifier
WRITTEN_AT_ONCE = 1024  # pieces: IOV_MAX of Linux


@dataclass(frozen=True)
class StateLayout:
    """What every row of a store is. Two stores with different layouts never mix."""

    taps: tuple[int, ...]  # EAGLE-3 ids (INPUT of layer i), ascending
    hidden_size: int
    dtype: str  # "bfloat16" | "float32" | "float8_e4m3fn"
    verifier: str  # model name
    verifier_revision: str  # commit, or sha256 of the local weights' index
    tokenizer_sha256: str
    version: int = VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(int(tap) for tap in self.taps))
        _require_version(self.version)
        if self.dtype not in _TORCH_TYPES:
            raise MustFix(f"State dtype {self.dtype} is unknown", where="store.json", remedy=f"use one of {', '.join(_TORCH_TYPES)}")
        if not self.taps or list(self.taps) != sorted(set(self.taps)):
            raise MustFix(f"The taps {list(self.taps)} are not ascending", where="store.json", remedy="name each layer once, in order")

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_TYPES[self.dtype]

    @property
    def is_fp8(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> (type, shape of ONE row), in file order."""
        wide = (len(self.taps), self.hidden_size)
        scales = {"taps_scale": (torch.float32, wide[:1]), "final_scale": (torch.float32, ())} if self.is_fp8 else {}
        return {
            "logprob": (torch.float32, ()),
            **scales,
            "taps": (self.torch_dtype, wide),
            "final": (self.torch_dtype, wide[1:]),
        }

    def strides(self) -> dict[str, int]:
        """Name -> bytes of one row, in file order."""
        return {name: dtype.itemsize * _elements(shape) for name, (dtype, shape) in self.tensors().items()}

    @property
    def row_bytes(self) -> int:
        return sum(self.strides().values())

    def capacity(self, shard_bytes: int) -> int:
        """Rows of a shard of about `shard_bytes`."""
        return max(1, (shard_bytes - HEADER_ALIGNMENT) // self.row_bytes)

    def save(self, folder: Path) -> None:
        write_json_atomically(folder / STORE, {"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> "StateLayout":
        """Read `store.json`; missing, malformed or of an unknown version is a MustFix."""
        path = Path(folder) / STORE
        value = read_json(path)
        unreadable = MustFix("This is not the description of a state store", where=str(path), remedy="restore the file")
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise unreadable
        _require_version(value.get("version"))  # before the fields: another version may have others
        if set(value) != {field.name for field in dataclasses.fields(cls)}:
            raise unreadable
        return cls(**value)


def _require_version(version: object) -> None:
    if version != VERSION:
        raise MustFix(
            f"State store version {version} is not the version {VERSION} this program reads",
            where="store.json",
            remedy="use the program version that wrote it",
        )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def shard_numbers(folder: Path) -> list[int]:
    """Numbers of the shards in a folder; writers that share it leave gaps between them."""
    return sorted(int(path.name.split(".")[0].removeprefix("shard-")) for path in folder.glob("shard-*.safetensors"))


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 with one fp32 scale a vector: [..., H] -> float8_e4m3fn [..., H], scale [...] = amax / 448.

    Halves a store without a measured loss of acceptance (vllm-project/speculators issue 491).
    """
    rows = rows.float()  # [..., H]
    # By a tensor: by a number CUDA multiplies with the reciprocal, and every second scale would be off by its last bit.
    scale = rows.abs().amax(-1) / rows.new_full((), FP8_LARGEST)  # [...]
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = (rows / scale.unsqueeze(-1)).clamp(-FP8_LARGEST, FP8_LARGEST)  # rounding may pass 448 by an ulp: NaN in e4m3fn
    return scaled.to(torch.float8_e4m3fn), scale


def dequantize(stored: Tensor, scale: Tensor) -> Tensor:
    """[..., H] float8 and [...] fp32 -> bfloat16 [..., H]; its 8 bits of mantissa hold e4m3's 4 with room."""
    return (stored.float() * scale.unsqueeze(-1)).bfloat16()


def count_rows(layout: StateLayout, where: str, first_position: int, taps: Tensor, final: Tensor, logprob: Tensor) -> int:
    """How many rows these are; JobError where their shapes do not fit the layout or each other."""
    rows, width, count = len(logprob), layout.hidden_size, len(layout.taps)
    got = tuple(taps.shape), tuple(final.shape), tuple(logprob.shape)
    if got != ((rows, count, width), (rows, width), (rows,)) or first_position < 0:
        raise JobError(f"Rows of shapes {got} at position {first_position} do not fit {count} taps of width {width}", where=where)
    return rows


def encode(layout: StateLayout, taps: Tensor, final: Tensor, logprob: Tensor) -> Rows:
    """Rows as stored: taps [r, T, H], final [r, H], logprob [r] -> one contiguous tensor a name, on the device they are on."""
    rows: Rows = {"logprob": logprob.float().contiguous()}
    if layout.is_fp8:
        for name, wide in (("taps", taps), ("final", final)):
            parts = map(quantize, wide.split(QUANTIZED_AT_ONCE))  # [r, (T,) H] and [r, (T)] of each
            rows |= concatenated([{name: stored, f"{name}_scale": scale} for stored, scale in parts])
    else:
        rows["taps"] = taps.to(layout.torch_dtype).contiguous()
        rows["final"] = final.to(layout.torch_dtype).contiguous()
    return {name: rows[name] for name in layout.tensors()}


def concatenated(several: Sequence[Rows]) -> Rows:
    """Rows one behind the other; as bytes, because not every operation knows FP8 on every device."""
    return {name: torch.cat([rows[name].view(torch.uint8) for rows in several]).view(first.dtype) for name, first in several[0].items()}


def raw(rows: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The bytes of CPU tensors [r, ...], without a copy: [r, bytes of a row]. numpy has neither bf16 nor fp8."""
    flat = {name: tensor.detach().contiguous().reshape(len(tensor), -1) for name, tensor in rows.items()}
    return {name: tensor.view(torch.uint8).numpy() for name, tensor in flat.items()}


def checksum(rows: Mapping[str, Sequence[np.ndarray]]) -> str:
    """xxh3 (64 bit, hex) of an extent's bytes: its rows of every tensor, in file order."""
    digest = xxhash.xxh3_64()
    for pieces in rows.values():
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


def _header(layout: StateLayout, capacity: int) -> bytes:
    entries: dict[str, object] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(layout.version),
            "taps": json.dumps(list(layout.taps)),
            "hidden_size": str(layout.hidden_size),
            "dtype": layout.dtype,
            "verifier": layout.verifier,
            "verifier_revision": layout.verifier_revision,
            "tokenizer_sha256": layout.tokenizer_sha256,
        }
    }
    names = {dtype: _SAFETENSORS_NAMES[name] for name, dtype in _TORCH_TYPES.items()}
    offset = 0
    for name, (dtype, shape) in layout.tensors().items():
        end = offset + capacity * dtype.itemsize * _elements(shape)
        entries[name] = {"dtype": names[dtype], "shape": [capacity, *shape], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT - 8
    return struct.pack("<Q", length) + text.ljust(length, b" ")


def create_shard(folder: Path, number: int, layout: StateLayout, capacity: int) -> Path:
    """Make an empty shard of `capacity` rows: header, then a hole. It appears whole or not at all."""
    path = folder / shard_name(number)
    temporary = path.with_name(path.name + ".partial")
    header = _header(layout, capacity)
    with disk_full_named(path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, header)
            os.ftruncate(descriptor, len(header) + capacity * layout.row_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        fsync_folder(folder)
    return path


@dataclass(frozen=True)
class ShardPlan:
    """Where the rows of an existing shard lie: read from its header and checked against the layout."""

    path: Path
    capacity: int
    data_start: int  # bytes
    offsets: dict[str, int]  # tensor -> bytes after data_start

    @classmethod
    def read(cls, path: Path, layout: StateLayout) -> "ShardPlan":
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > size - 8:
                    raise ValueError("its header is longer than the file")
                header = json.loads(file.read(length))
            capacity = header["logprob"]["shape"][0]
            offsets = {name: header[name]["data_offsets"][0] for name in layout.tensors()}
        except FileNotFoundError:
            raise MustFix("A shard of the state store is missing", where=str(path), remedy="restore it") from None
        except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
            raise MustFix(f"The shard's header is damaged: {error}", where=str(path), remedy="restore the file") from None
        expected = _header(layout, capacity)
        if json.loads(expected[8:]) != header:
            raise MustFix("The shard was written with another layout", where=str(path), remedy="restore the right file")
        if size != 8 + length + capacity * layout.row_bytes:
            raise MustFix("The shard's length does not fit its header", where=str(path), remedy="restore the file")
        return cls(path, capacity, 8 + length, offsets)


class ShardFile:
    """A shard for writing rows. It is open only from a write or a read to the next `sync`: a store has thousands."""

    def __init__(self, plan: ShardPlan, layout: StateLayout):
        self.plan, self._dirty = plan, False
        self._tensors, self._strides = layout.tensors(), layout.strides()
        self._open_descriptor = -1

    def _descriptor(self) -> int:
        if self._open_descriptor < 0:
            self._open_descriptor = os.open(self.plan.path, os.O_RDWR | os.O_CLOEXEC)
        return self._open_descriptor

    def _place(self, name: str, row: int) -> int:
        return self.plan.data_start + self.plan.offsets[name] + row * self._strides[name]

    def write(self, first_row: int, rows: Mapping[str, Sequence[np.ndarray]]) -> None:
        with disk_full_named(self.plan.path):
            for name, pieces in rows.items():
                self._dirty = True
                _write_pieces(self._descriptor(), pieces, self._place(name, first_row))

    def read(self, row: int) -> Rows:
        """One row [1, ...] of every tensor, as a reader of the file would find it."""
        found: Rows = {}
        for name, (dtype, shape) in self._tensors.items():
            read = bytearray(os.pread(self._descriptor(), self._strides[name], self._place(name, row)))
            found[name] = torch.frombuffer(read, dtype=dtype).view(1, *shape)
        return found

    def sync(self) -> None:
        if self._dirty:
            with disk_full_named(self.plan.path):
                os.fdatasync(self._descriptor())
            self._dirty = False
        self.close()

    def close(self) -> None:
        if self._open_descriptor >= 0:
            os.close(self._open_descriptor)
            self._open_descriptor = -1


def _write_pieces(descriptor: int, pieces: Sequence[np.ndarray], place: int) -> None:
    """Write pieces one behind the other; one call may write less than it was given."""
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        written = os.pwritev(descriptor, left[:WRITTEN_AT_ONCE], place)
        place += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


class MappedShard:
    """A shard mapped into memory for reading: tensors are views of the page cache, nothing is copied.

    The map is private and writable only because torch warns about read-only buffers: a write would
    change this process's copy of a page, never the file. NORESERVE keeps terabytes of such maps from
    counting as memory.
    """

    def __init__(self, plan: ShardPlan, layout: StateLayout):
        with open(plan.path, "rb") as file:
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE
            self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.tensors: dict[str, Tensor] = {}  # name -> [R, ...]
        for name, (dtype, shape) in layout.tensors().items():
            flat = torch.frombuffer(
                self._map,
                dtype=dtype,
                count=plan.capacity * _elements(shape),
                offset=plan.data_start + plan.offsets[name],
            )
            self.tensors[name] = flat.view(plan.capacity, *shape)

    def rows(self, first_row: int, rows: int) -> Rows:
        """Views [rows, ...] of every tensor, in file order."""
        return {name: tensor[first_row : first_row + rows] for name, tensor in self.tensors.items()}
