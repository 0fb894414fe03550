# SPDX-License-Identifier: Apache-2.0
"""Master copies: each layer's bytes in host memory, as one contiguous range in layout order, so that one copy loads it.

`HostMaster` keeps them in anonymous memory, filled from the model. `SafetensorsMaster` maps the weights file and uses
its bytes where a layer's tensors lie there one after another: such a layer is packed in the order of the file and needs
no second copy in RAM. Only `advanced.rewrite` writes a master copy after it was made, and none that is a file.

Make the master before `bind.install`, and use the master's layout from then on: the order of the file may differ.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from remap.errors import InvalidArgument, InvalidState
from remap.model.bind import Tensors, changed, fill
from remap.model.pack import LayerLayout, Layout

__all__ = [
    "FileMatch",
    "HostMaster",
    "HostRange",
    "MasterCopy",
    "SafetensorsMaster",
    "WeightsFile",
    "anonymous",
    "make_master",
    "match_files",
]

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostRange:
    """A layer's bytes in host memory: `nbytes` (not rounded up) from `address` on.

    source: "memory" (starts at an OS page, may be page-locked) or "file" (mapped read-only, so that a write faults;
    starts at any byte; page-locking it needs the driver's read-only flag).
    """

    layer: int
    address: int
    nbytes: int
    source: str


class WeightsFile:
    """A mapped file, with its size and time of modification when it was opened.

    The mapping shows the file's own pages: a program that overwrites the file in place changes the weights, and after a
    program has truncated it, reading the lost pages ends this process with SIGBUS. So the session compares size and
    time of modification of the open file before it uses the mapping. Renaming another file over this one, or deleting
    it, is no change: the mapped file lives until it is unmapped. A write that also puts the time of modification back
    is not seen.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.size, self._modified_ns = self._look()
        self.mapping = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ) if self.size else b""

    @property
    def changed(self) -> bool:
        return self._look() != (self.size, self._modified_ns)

    def refuse_change(self) -> None:
        """Raises InvalidState if the file has changed.

        Its fields are file, expected and found; the latter two are (size in bytes, time of modification in ns).
        """
        found = self._look()
        if found != (self.size, self._modified_ns):
            raise InvalidState(
                f"{self.path}, which was given as weights=, has changed: it had {self.size} bytes, modified at "
                f"{self._modified_ns} ns, and now has {found[0]} bytes, modified at {found[1]} ns; nothing was read "
                "from it; put the same bytes back into the same file, with the old time of modification (cp -p keeps "
                "it), then detach the tenant",
                file=str(self.path),
                expected=(self.size, self._modified_ns),
                found=found,
            )

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns


class MasterCopy(Protocol):
    """The part of a master copy that the session uses. Addresses are valid while the object lives."""

    layout: Layout
    """Fill and install with this layout: layers that come from a file are in the file's order."""
    reason: str
    """Why some layers do not come from the given files; "" if all of them do, or no files were given."""

    def range(self, layer: int) -> HostRange:
        """Where the layer's bytes are."""
        ...

    def tensor(self, layer: int) -> torch.Tensor:
        """The same bytes as a 1-D uint8 tensor that keeps them alive. Copy from it; never write to it."""
        ...

    def keep_alive(self) -> tuple[object, ...]:
        """Objects that must live as long as the addresses are used."""
        ...

    def refuse_change(self, layers: Collection[int]) -> None:
        """Raises InvalidState (`WeightsFile.refuse_change`) if the file that one of these layers comes from has
        changed.

        Call it before the bytes of these layers are used.
        """
        ...

    def changed(self, layers: Collection[int]) -> dict[int, list[str]]:
        """layer -> its file, for each of these layers whose file has changed."""
        ...


class _Master:
    """The part that both masters share: one 1-D uint8 tensor and its source for each layer."""

    def __init__(self, layout: Layout, layers: Sequence[tuple[torch.Tensor, str]], reason: str) -> None:
        self.layout = layout
        self.reason = reason
        self._layers = tuple(layers)
        self._files: Mapping[int, WeightsFile] = {}  # layer -> the file that it is mapped from

    def range(self, layer: int) -> HostRange:
        tensor = self.tensor(layer)
        return HostRange(layer, tensor.data_ptr(), tensor.numel(), self._layers[layer][1])

    def tensor(self, layer: int) -> torch.Tensor:
        if not 0 <= layer < len(self._layers):
            raise InvalidArgument(
                f"layer is {layer}, expected 0 to {len(self._layers) - 1}. Nothing was changed",
                layer=layer,
                layers=len(self._layers),
            )
        return self._layers[layer][0]

    def keep_alive(self) -> tuple[object, ...]:
        return tuple(tensor for tensor, _ in self._layers)

    def refuse_change(self, layers: Collection[int]) -> None:
        for file in {self._files[layer] for layer in layers if layer in self._files}:
            file.refuse_change()

    def changed(self, layers: Collection[int]) -> dict[int, list[str]]:
        files = {self._files[layer] for layer in layers if layer in self._files}
        gone = {file for file in files if file.changed}
        return {layer: [str(self._files[layer].path)] for layer in layers if self._files.get(layer) in gone}

    @property
    def memory_bytes(self) -> int:
        """Bytes that this object holds in anonymous memory (a file mapping costs only page cache)."""
        return sum(tensor.numel() for tensor, source in self._layers if source == "memory")


class HostMaster(_Master):
    """Master copies in host memory, one allocation per layer, filled from the model's present values.

    allocate: nbytes -> 1-D uint8 tensor of at least that many bytes, for page-locked memory; by default an anonymous
    private mapping, which starts at an OS page. The model may be on any device and does not change. Raises
    InvalidArgument if the layout was made for another model; OSError or MemoryError if there is not enough memory.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Tensors,
        *,
        allocate: Callable[[int], torch.Tensor] | None = None,
        reason: str = "",
    ) -> None:
        layers = [(_copy_of(layer, tensors, allocate or anonymous), "memory") for layer in layout.layers]
        super().__init__(layout, layers, reason)


class SafetensorsMaster(_Master):
    """Master copies in memory-mapped safetensors files, with host memory for the layers that do not match.

    match: the result of `match_files` for `model`. reasons: layer -> why it is in host memory. The files must not
    change or shrink while this object lives; `refuse_change` raises if they have (see `WeightsFile`).
    """

    def __init__(
        self, match: FileMatch, tensors: Tensors, *, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        layers = [
            (_copy_of(layer, tensors, allocate or anonymous), "memory") if data is None else (data, "file")
            for layer, data in zip(match.layout.layers, match.data, strict=True)
        ]
        super().__init__(match.layout, layers, match.reason)
        self.reasons = dict(match.reasons)
        self._files = dict(match.files)


@dataclass(frozen=True)
class FileMatch:
    """The layers that can be loaded from files.

    layout: matching layers are in file order. data: for each layer its bytes in the file (read-only), or None. files:
    layer -> its file, for the layers that match. reasons: layer -> why it does not match.
    """

    layout: Layout
    data: tuple[torch.Tensor | None, ...]
    files: Mapping[int, WeightsFile]
    reasons: Mapping[int, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        return "; ".join(f"layer {layer}: {why}" for layer, why in self.reasons.items())


def match_files(
    files: Files,
    layout: Layout,
    tensors: Tensors,
    *,
    prefix: str = "",
    names: Mapping[str, str] | None = None,
    file_alignment: int = 64,
) -> FileMatch:
    """Find the layers that can be loaded from `files`: one safetensors file, several, or a directory (all its
    *.safetensors).

    A layer matches if its tensors fill one contiguous range of one file; if their names there are `names[path]` (or
    prefix + path); if dtype, shape and every byte are as in `model` now; and if they lie `file_alignment`-aligned from
    the start of the range. Every byte of such a layer is read once for the comparison. Layers without bytes do not
    match. The model does not change.

    Raises InvalidArgument if a file is missing or is not a safetensors file, or if two files hold one name;
    InvalidState if a file changes meanwhile.
    """
    index = _open_all(_expand(files))
    data: list[torch.Tensor | None] = []
    mapped: dict[int, WeightsFile] = {}
    reasons: dict[int, str] = {}
    for number, layer in enumerate(layout.layers):
        data.append(None)
        if not layer.nbytes:
            continue
        found = _find(layer, index, prefix, names or {})
        if isinstance(found, str):
            reasons[number] = found
            continue
        file, content, offsets = found
        try:
            reordered = layout.with_file_order({number: offsets}, file_alignment)
        except InvalidArgument as refused:
            reasons[number] = str(refused)
            continue
        different = changed(reordered.layers[number], tensors, content)
        if different:
            reasons[number] = f"{different[0]} has other values in the model than in the file"
            continue
        layout, data[number], mapped[number] = reordered, content, file
    for file in set(mapped.values()):
        file.refuse_change()  # it may have changed while its bytes were compared
    return FileMatch(layout, tuple(data), mapped, reasons)


def make_master(
    tensors: Tensors,
    layout: Layout,
    *,
    files: Files | None = None,
    prefix: str = "",
    names: Mapping[str, str] | None = None,
    file_alignment: int = 64,
    allocate: Callable[[int], torch.Tensor] | None = None,
    locked: bool = False,
) -> HostMaster | SafetensorsMaster:
    """The master copy of a model that is not yet installed: layers that match `files` stay there, others go to host
    memory.

    Arguments and errors as in `match_files` and `HostMaster`. locked: all of them must be in page-locked memory (`allocate`
    gives it), which a mapped file is not. In that case, and if no layer matches, the result is a `HostMaster` with the given
    layout and a `reason`. Use `.layout` of the result from then on.
    """
    if files is None:
        return HostMaster(layout, tensors, allocate=allocate)
    if locked:
        _open_all(_expand(files))  # a wrong path is refused on every device
        reason = "every layer: a mapped file is not page-locked, so a device copies from it far below its link's speed"
        return HostMaster(layout, tensors, allocate=allocate, reason=reason)
    match = match_files(files, layout, tensors, prefix=prefix, names=names, file_alignment=file_alignment)
    if all(data is None for data in match.data):
        return HostMaster(layout, tensors, allocate=allocate, reason=match.reason)
    return SafetensorsMaster(match, tensors, allocate=allocate)


# --- host memory -------------------------------------------------------------------------------------------------


def anonymous(nbytes: int) -> torch.Tensor:
    """Zeroed private memory that starts at an OS page and is freed with the tensor."""
    # Private, because Python's default is a shared mapping, which a forked child could write to.
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]


def _copy_of(layer: LayerLayout, tensors: Tensors, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    memory = allocate(layer.nbytes)[: layer.nbytes]
    fill(layer, tensors, memory)
    return memory


# --- safetensors -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a file: bytes [start, end) of `content`, the whole file."""

    file: WeightsFile
    content: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _find(
    layer: LayerLayout, index: Mapping[str, _Entry], prefix: str, names: Mapping[str, str]
) -> tuple[WeightsFile, torch.Tensor, dict[str, int]] | str:
    """(file, the layer's bytes in it, path -> offset in these bytes), or the reason why the layer does not match."""
    entries: dict[str, _Entry] = {}
    places: dict[tuple[object, ...], _Entry] = {}
    for placed in layer.tensors:
        spec = placed.spec
        key = names.get(spec.path, prefix + spec.path)
        entry = index.get(key)
        if not spec.span_bytes or entry is None:
            continue
        if entry.dtype != spec.dtype or entry.shape != spec.shape:
            return (
                f"{spec.path} is {spec.dtype} {spec.shape}, but {entry.dtype} {entry.shape} in {entry.file.path.name}"
            )
        if not _is_row_major(spec.shape, spec.stride):
            return f"{spec.path} is not contiguous in memory (stride {spec.stride}), as it is in a file"
        entries[spec.path] = entry
        places[spec.storage, spec.storage_offset_bytes, spec.dtype, spec.shape] = entry
    for placed in layer.tensors:
        spec = placed.spec
        if spec.span_bytes and spec.path not in entries:
            # A file holds one of several names of one tensor.
            twin = places.get((spec.storage, spec.storage_offset_bytes, spec.dtype, spec.shape))
            if twin is None:
                return (
                    f"{spec.path} is not in the files (as {names.get(spec.path, prefix + spec.path)!r}); keep it "
                    "resident (mutable=) to use the file for the others"
                )
            entries[spec.path] = twin
    if len({entry.file for entry in entries.values()}) > 1:
        return f"is split between files {sorted({entry.file.path.name for entry in entries.values()})}"
    ranges = {(entry.start, entry.end) for entry in entries.values()}
    start, end = min(ranges)[0], max(ranges)[1]
    if sum(last - first for first, last in ranges) != end - start:
        return "other tensors lie between its tensors in the file"
    offsets = {
        placed.spec.path: entries[placed.spec.path].start - start if placed.spec.span_bytes else 0
        for placed in layer.tensors
    }
    one = next(iter(entries.values()))
    return one.file, one.content[start:end], offsets


def _is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for size, given in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and given != step:
            return False
        step *= size
    return True


def _expand(files: Files) -> list[Path]:
    paths = [Path(files)] if isinstance(files, str | os.PathLike) else [Path(file) for file in files]
    expanded = [found for path in paths for found in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
    if not expanded:
        raise InvalidArgument(
            f"no safetensors file in {[str(path) for path in paths]}. Nothing was changed; name the weight files, or "
            "leave files= out",
            files=tuple(map(str, paths)),
        )
    return expanded


def _open_all(paths: Sequence[Path]) -> dict[str, _Entry]:
    index: dict[str, _Entry] = {}
    for path in paths:
        for name, entry in _open(path).items():
            if name in index:
                raise InvalidArgument(
                    f"{name!r} is in {index[name].file.path} and in {path}. Nothing was changed; name the files of one "
                    "checkpoint only",
                    name=name,
                    files=(str(index[name].file.path), str(path)),
                )
            index[name] = entry
    return index


def _open(path: Path) -> dict[str, _Entry]:
    """Map a safetensors file read-only: 8 bytes header length (little-endian), JSON header, then the tensors."""

    def refuse(why: str) -> InvalidArgument:
        return InvalidArgument(
            f"{path} is not a usable safetensors file: {why}. Nothing was changed; leave it out of files=",
            file=str(path),
        )

    try:
        file = WeightsFile(path)
    except OSError as error:
        raise refuse(str(error)) from error
    size, mapping = file.size, file.mapping
    if size < 8:
        raise refuse(f"it has {size} bytes")
    base = 8 + struct.unpack("<Q", mapping[:8])[0]
    if base > size:
        raise refuse(f"its header says {base - 8} bytes, and there are {size - 8}")
    entries: dict[str, _Entry] = {}
    with warnings.catch_warnings():
        # torch warns that it cannot mark a tensor read-only. Nothing here writes to these tensors; a write would fault.
        warnings.simplefilter("ignore", UserWarning)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        header = json.loads(mapping[8:base])
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end <= size - base:
                raise refuse(f"{name!r} lies outside of it")
            entries[name] = _Entry(
                file=file,
                content=content,
                dtype=_DTYPES.get(entry["dtype"], str(entry["dtype"])),
                shape=tuple(entry["shape"]),
                start=base + start,
                end=base + end,
            )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise refuse(f"its header is malformed ({error!r})") from error
    return entries
