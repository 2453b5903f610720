"""What is stored of one saved tensor, and the handles that autograd gets for it.

An entry holds as little as backward asks for: a stream of values, the mask of a ReLU, or only the shape. Several
handles share it, as a ReLU's result is also what the next layer saves.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from horovod_aps.activations import codec, memory

CHANGED = (  # autograd's own words; it leaves this check to whoever has hooks
    "ActivationCompressor: one of the variables needed for gradient computation has been modified by an inplace "
    "operation"
)
NOTHING, SHAPE, MASK, VALUES = range(4)  # what backward needs, each covers those before


def flat_view(data: Tensor) -> Tensor | None:
    """All elements as a vector, in the order of memory where they fill it, else copied; None if elements overlap."""
    if data.is_contiguous() and not data.is_neg():
        return data.view(-1)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(data.stride(), data.shape) if size > 1):
        if stride != expected:
            break
        expected *= size
    if expected == data.numel() and not data.is_neg():
        return data.as_strided((data.numel(),), (1,), data.storage_offset())
    if data.nbytes > data.untyped_storage().nbytes():
        return None
    return data.resolve_neg().contiguous().view(-1)


class Entry:
    """One tensor's content; `layer` is the name of the layer that saved it first."""

    def __init__(self, layer: str, data: Tensor, storage: torch.UntypedStorage) -> None:
        self.layer = layer
        self.n_bytes = data.nbytes
        self.n, self.dtype, self.device = data.numel(), data.dtype, data.device
        self.need = NOTHING
        self.n_uses = 0
        self.bound: float | None = None
        self.coarse = 0
        """Where the mask of the ReLU behind it is off the bound is 2^coarse times as large."""
        self.stream: codec.Stream | None = None
        """Of its values, if they are stored as one."""
        self.guide: codec.Guide | None = None
        """Of a ReLU's result: its mask, and what its values follow from."""
        self.cached: Tensor | None = None
        self.trims = False
        """Whether memory that malloc holds is given back when its values are asked for."""
        self._storage = StorageWeakRef(storage)  # as long as it is here, no other storage has the same address
        self._waiting: tuple[Tensor, int] | None = None
        self._content: Tensor | None = None
        self._decode: Callable[[Tensor], Tensor] | None = None
        self._changed = False
        self._lock = threading.Lock()

    @property
    def stored_bytes(self) -> int:
        """What it takes now."""
        if self._waiting is not None:
            return self.n_bytes
        own = self.guide.mask if self.guide is not None and self.need == VALUES else None
        return (self._content.nbytes if self._content is not None else 0) + (own.nbytes if own is not None else 0)

    @property
    def is_predicted(self) -> bool:
        return self.stream is not None and self.stream.depth > 0

    @property
    def is_lossy(self) -> bool:
        return self.bound is not None

    # ---- saving

    def wait(self, flat: Tensor) -> None:
        """Keep the tensor until it is known what of it is needed."""
        self._waiting = (flat, flat._version)

    def settle(self) -> None:
        """Store what is needed of the tensor that waits, if one does."""
        with self._lock:
            if self._waiting is None:
                return
            (flat, version), self._waiting = self._waiting, None
            self._changed = flat._version != version
            if self.need == MASK and not self._changed:
                n, dtype = self.n, self.dtype
                bits = self.guide.mask if self.guide is not None else None
                bits = codec.pack_mask(flat, positive=True) if bits is None else bits
                self._put(bits, lambda bits: codec.unpack_mask(bits, n, dtype))
            self.guide = None

    def store_values(self, flat: Tensor, bound: float, guide: codec.Guide | None = None, both: bool = False) -> bool:
        """Store all values within the bound; exactly if they are only zero and one other, as in masks.

        guide: what the stream may be decoded beside; both: try it without as well. Returns whether it is used.
        """
        with self._lock:
            if self._waiting is not None and self._waiting[0]._version != self._waiting[1]:
                self._waiting, self._changed = None, True
                return False
            self._waiting = self.cached = self.stream = None
            self.coarse = 0
            n, dtype = self.n, self.dtype
            other = 1 if dtype == torch.bool else codec.other_value(flat)
            if other is not None:
                self._put(codec.pack_mask(flat, False), lambda bits: codec.unpack_mask(bits, n, dtype, other))
                self.bound, guide = 0.0, None
            else:
                content = codec.encode(flat, bound, guide)
                if both and guide is not None:
                    alone = codec.encode(flat, bound)
                    mask = guide.mask.nbytes if self.guide is not None and guide.mask is not None else 0
                    if alone.nbytes <= content.nbytes + mask:
                        content, guide = alone, None
                if content.nbytes < flat.nbytes:
                    self._put(content, lambda content: codec.decode(content, n, dtype, guide))
                    self.stream = codec.Stream(content, n, dtype, guide)
                    self.coarse = guide.coarse if guide is not None else 0
                else:
                    kept, guide = Kept(flat), None  # it does not compress
                    self._put(flat, lambda _: kept.tensor())
                self.bound = bound
            if guide is None:
                self.guide = None
            return guide is not None

    def store_indices(self, bits: Tensor, pool: codec.Pool, data: Tensor) -> None:
        """Store indices of max-pooling, exactly; they come back in the layout of `data`."""
        self.need = VALUES
        shape, stride = data.shape, data.stride()

        def decode(bits: Tensor) -> Tensor:
            out = torch.empty_strided(shape, stride, dtype=torch.int64)
            out.copy_(codec.unpack_pool(bits, pool).view(shape))
            return out.as_strided((out.numel(),), (1,))

        self._put(bits, decode)

    def _put(self, content: Tensor, decode: Callable[[Tensor], Tensor]) -> None:
        self._content, self._decode = content, decode

    # ---- giving back

    def flat(self) -> Tensor | None:
        """All elements; None if only the shape was kept."""
        with self._lock:
            if self._waiting is not None:
                flat, version = self._waiting
                self._changed = flat._version != version
            if self._changed:
                raise RuntimeError(CHANGED)
            if self._waiting is not None:
                return self._waiting[0]
            if self._content is None or self._decode is None:
                return None
            self.n_uses -= 1
            out = self._decode(self._content) if self.cached is None else self.cached
            self.cached = out if self.n_uses > 0 else None
        _remember(self)
        return out


_last: weakref.ref[Entry] | None = None
_last_lock = threading.Lock()


def _remember(entry: Entry) -> None:
    """Only the entry that was asked for last keeps its values, for the layer that asks next."""
    global _last
    with _last_lock:
        before = _last() if _last is not None else None
        _last = weakref.ref(entry)
    if before is not None and before is not entry:
        before.cached = None


class Kept:
    """A tensor that is stored as it is: not a copy, so it must not change."""

    __slots__ = ("data", "version")

    def __init__(self, data: Tensor) -> None:
        self.data, self.version = data, data._version

    def tensor(self) -> Tensor:
        """The tensor, if it is what it was."""
        if self.data._version != self.version:
            raise RuntimeError(CHANGED)
        return self.data


class Handle:
    """What autograd holds instead of a tensor."""

    __slots__ = ("entry", "shape", "stride", "add_time")

    def __init__(self, entry: Entry, data: Tensor, add_time: Callable[[float], None]) -> None:
        self.entry, self.shape, self.stride = entry, data.shape, data.stride()
        self.add_time = add_time

    def tensor(self) -> Tensor:
        """The tensor again, with its strides."""
        start = time.perf_counter()
        flat = self.entry.flat()
        if flat is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.entry.dtype, device=self.entry.device)
        if self.entry.trims:
            memory.trim()
        out = flat.as_strided(self.shape, _strides(self.shape, self.stride), flat.storage_offset())
        self.add_time(time.perf_counter() - start)
        return out


def _strides(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the tensor where its elements filled their memory, else those of its contiguous copy."""
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    n = shape.numel()
    if reach == n or n == 0:
        return stride
    contiguous, step = [], 1
    for size in reversed(shape):
        contiguous.append(step)
        step *= size
    return tuple(reversed(contiguous))
