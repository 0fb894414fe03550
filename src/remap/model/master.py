# SPDX-License-Identifier: Apache-2.0
"""Master copies: each layer's bytes in host memory, as one contiguous range in layout order, so that one copy loads it.

They are in anonymous memory, filled from the model; or bytes of a mapped weights file, where a layer's tensors lie there one
after another: such a layer is packed in the order of the file and needs no second copy in RAM. Only `advanced.rewrite` writes a
master copy after it was made, and none that is a file.

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
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from remap.errors import InvalidArgument, InvalidState
from remap.model.bind import Tensors, changed, fill
from remap.model.pack import LayerLayout, Layout

__all__ = [
    "MasterCopy",
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


class MasterCopy:
    """The master copies of all layers. Addresses are valid while the object lives.

    layout: fill and install with it: layers that come from a file are in the file's order. reason: why some layers do not come
    from the given files; "" if all of them do, or no files were given. files: layer -> the file that it is mapped from,
    read-only; they must not change or shrink meanwhile (`refuse_change`). The other layers are in host memory.
    """

    def __init__(
        self,
        layout: Layout,
        layers: Sequence[torch.Tensor],
        reason: str = "",
        files: Mapping[int, WeightsFile] = MappingProxyType({}),
    ) -> None:
        self.layout, self.reason, self.files = layout, reason, files
        self._layers = tuple(layers)

    def tensor(self, layer: int) -> torch.Tensor:
        """The layer's bytes as a 1-D uint8 tensor that keeps them alive. Copy from it; only `advanced.rewrite` writes to it."""
        return self._layers[layer]

    def refuse_change(self, layers: Collection[int]) -> None:
        """Raises InvalidState (`WeightsFile.refuse_change`) if the file that one of these layers comes from has
        changed.

        Call it before the bytes of these layers are used.
        """
        for file in {self.files[layer] for layer in layers if layer in self.files}:
            file.refuse_change()

    def changed(self, layers: Collection[int]) -> dict[int, list[str]]:
        """layer -> its file, for each of these layers whose file has changed."""
        files = {self.files[layer] for layer in layers if layer in self.files}
        gone = {file for file in files if file.changed}
        return {layer: [str(self.files[layer].path)] for layer in layers if self.files.get(layer) in gone}


def match_files(
    files: Files, layout: Layout, tensors: Tensors, names: Mapping[str, str]
) -> tuple[Layout, list[torch.Tensor | None], dict[int, WeightsFile], dict[int, str]]:
    """Find the layers that can be loaded from `files`: one safetensors file, several, or a directory (all its
    *.safetensors).

    A layer matches if its tensors fill one contiguous range of one file; if their names there are `names[path]` (or
    the path); if dtype, shape and every byte are as in the model now; and if they lie aligned from the start of the range. Every
    byte of such a layer is read once for the comparison. Layers without bytes do not match. The model does not change.

    Returns the layout, in which matching layers are in file order; for each layer its bytes in the file (read-only), or None;
    the file of each layer that matches; and the reason of each that does not.

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
        found = _find(layer, index, names)
        if isinstance(found, str):
            reasons[number] = found
            continue
        file, content, offsets = found
        try:
            reordered = layout.with_file_order({number: offsets})
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
    return layout, data, mapped, reasons


def make_master(
    tensors: Tensors,
    layout: Layout,
    *,
    files: Files | None = None,
    names: Mapping[str, str] | None = None,
    allocate: Callable[[int], torch.Tensor] | None = None,
    locked: bool = False,
) -> MasterCopy:
    """The master copy of a model that is not yet installed: layers that match `files` stay there, others are filled from the
    present values, in host memory. The model may be on any device and does not change.

    Arguments and errors as in `match_files`, which says which layers match. allocate: nbytes -> 1-D uint8 tensor of at least that
    many bytes, for page-locked memory; by default an anonymous private mapping, which starts at an OS page. locked: all of them
    must be in such memory, which a mapped file is not. Raises InvalidArgument if the layout was made for another model; OSError
    or MemoryError if there is not enough memory.
    """
    data: Sequence[torch.Tensor | None] = (None,) * len(layout.layers)
    mapped, reason = dict[int, WeightsFile](), ""
    if files is not None and locked:
        _open_all(_expand(files))  # a wrong path is refused on every device
        reason = "every layer: a mapped file is not page-locked, so a device copies from it far below its link's speed"
    elif files is not None:
        layout, data, mapped, reasons = match_files(files, layout, tensors, names or {})
        reason = "; ".join(f"layer {layer}: {why}" for layer, why in reasons.items())
    layers = []
    for part, there in zip(layout.layers, data, strict=True):
        layers.append((allocate or anonymous)(part.nbytes)[: part.nbytes] if there is None else there)
        if there is None:
            fill(part, tensors, layers[-1])
    return MasterCopy(layout, layers, reason, mapped)


# --- host memory -------------------------------------------------------------------------------------------------


def anonymous(nbytes: int) -> torch.Tensor:
    """Zeroed private memory that starts at an OS page and is freed with the tensor."""
    # Private, because Python's default is a shared mapping, which a forked child could write to.
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]


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
    layer: LayerLayout, index: Mapping[str, _Entry], names: Mapping[str, str]
) -> tuple[WeightsFile, torch.Tensor, dict[str, int]] | str:
    """(file, the layer's bytes in it, path -> offset in these bytes), or the reason why the layer does not match."""
    entries: dict[str, _Entry] = {}
    places: dict[tuple[object, ...], _Entry] = {}
    for placed in layer.tensors:
        spec = placed.spec
        key = names.get(spec.path, spec.path)
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
                    f"{spec.path} is not in the files (as {names.get(spec.path, spec.path)!r}); keep it "
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
