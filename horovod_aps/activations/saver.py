"""`ActivationCompressor`: compresses what autograd saves, and gives it back when backward asks.

Flow: autograd saves a tensor, `_pack` finds out whose it is and whether it is stored already, the codec makes bytes of
it; `_unpack` makes a tensor of them again. Bounds come from `bounds`. A tensor's entry lives as long as the graph
that saved it: nothing here holds on to it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from horovod_aps.activations import bounds, codec, memory, prediction
from horovod_aps.activations.bounds import Layer
from horovod_aps.activations.entries import MASK, NOTHING, SHAPE, VALUES, Entry, Handle, Kept, flat_view

MIN_SIZE = 4096  # elements; what is smaller is kept as it is
MIN_RATIO = 1.5  # a layer below it is warned of
QUANTILE = 0.9  # of a batch norm's channels, whose predictions are to be within the bound of what they predict
SUM = 0.6  # of that bound for each of two batch norms that are added up
FINER = 4.0  # times, at most, that a bound becomes finer for it
_POOLS = (nn.MaxPool1d, nn.MaxPool2d)


class _Pass(threading.local):
    """What one thread knows while it is in `with saver`."""

    def __init__(self) -> None:
        self.contexts: list[contextlib.ExitStack] = []
        self.stack: list[tuple[Layer, nn.Module, int]] = []
        """Modules at work, and how many elements their input has."""
        self.pending: Entry | None = None
        """A mask that becomes values if the next layer asks for them."""
        self.postponed: tuple[Entry, Tensor, int] | None = None
        """Values that become a shape if the next tensor is the indices of max-pooling; when they were saved."""
        self.norm: prediction.Norm | None = None
        """The batch norm at work."""
        self.waiting: list[_Waiting] = []
        """Inputs of batch norms that wait for the mask of the ReLU behind."""
        self.tally = _Tally()
        self.pictures: torch.Size | None = None
        """Shape of the last tensor of floats that was saved: max-pooling saves its indices right after its input."""


@dataclass(eq=False)
class _Waiting:
    entry: Entry
    flat: Tensor
    bound: float
    coarse: int
    age: int = 0
    """Tensors that were saved since."""


_savers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[ActivationCompressor]] = (
    weakref.WeakKeyDictionary()
)


def _tell_of_steps(optimizer: torch.optim.Optimizer, saver: ActivationCompressor) -> None:
    """Have `saver._stepped` called after every step of the optimizer, which does not keep the saver.

    One hook for all savers of an optimizer, and it stays: the end of a saver may come in the middle of a step.
    """
    savers = _savers.get(optimizer)
    if savers is None:
        savers = _savers[optimizer] = weakref.WeakSet()

        def after(*_: Any) -> None:
            for one in list(savers):
                one._stepped()

        optimizer.register_step_post_hook(after)
    savers.add(saver)


class ActivationCompressor:
    """Compresses what a model's forward pass saves for backward: `with saver: loss = criterion(model(x), y)`.

    Args:
        model: the module whose layers are told apart; may be wrapped in DDP.
        optimizer: the one that trains it, for the bounds of "auto"; a `hvd.DistributedOptimizer` is one too.
        error_bound: "auto", or a number: no activation changes by more than that.
        relative: the number is a share of each tensor's root mean square; for what layers with a weight are given, that
            of the last refresh.
        share: with "auto", the error of a weight's gradient (its standard deviation) over the layer's mean |momentum|.
        every: steps between two refreshes of the bounds; the first follow after 1, 2, 4, ... steps.
        min_size: tensors with fewer elements are kept as they are.
        scaler: the `GradScaler` whose scale the gradients carry, if there is one.
        trim: large CPU tensors come from a pool whose free pages are used again, for the whole process and as long as
            the saver lives; where that was not built, memory that malloc holds but nobody uses goes back to the system,
            and steps are longer. Without it the resident size on glibc falls little.

    Signs and zeros stay, so the mask of a ReLU is exact. Backward may run inside or outside of the `with` block, in
    any thread. Compiled modules work, but are one layer to it (see `docs/activations.md`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        error_bound: float | str = "auto",
        relative: bool = False,
        share: float = 0.01,
        every: int = 100,
        min_size: int = MIN_SIZE,
        scaler: Any = None,
        trim: bool = True,
    ) -> None:
        where = "ActivationCompressor"
        if not isinstance(model, nn.Module):
            raise TypeError(f"{where}: model must be a torch.nn.Module, got {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{where}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if error_bound == "auto":
            if optimizer is None:
                raise ValueError(f'{where}: error_bound "auto" needs the optimizer; give it, or a number')
        elif isinstance(error_bound, (str, bool)) or not (math.isfinite(error_bound) and error_bound >= 0):
            raise ValueError(
                f'{where}: error_bound must be "auto" or a number that is not negative, got {error_bound!r}'
            )
        if not 0 < share < 1:
            raise ValueError(f"{where}: share must be between 0 and 1, got {share}")
        if every < 1 or min_size < 1:
            raise ValueError(f"{where}: every and min_size must be at least 1, got {every} and {min_size}")
        self.error_bound, self.relative, self.share = error_bound, relative, share
        self.every, self.min_size, self.trim = every, min_size, trim
        self._optimizer, self._scaler = optimizer, scaler
        self._model = model
        self._layers = {
            id(module): Layer(name or type(module).__name__, module)
            for name, module in model.named_modules()
            if not any(True for _ in module.children())
        }
        self._rest = Layer("(other)", None)
        self._by_name = {layer.name: layer for layer in [*self._layers.values(), self._rest]}
        self._pass = _Pass()
        self._entries: weakref.WeakValueDictionary[tuple[Any, ...], Entry] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._counts = _Counts()
        self._hooks: list[Any] = []
        self._n_inside = 0
        self._n_steps = 0
        self._n_passes = 0  # since the optimizer's last step
        self._saw_start: bool | None = None  # the momentum's; not if it was loaded
        self._batch = 0
        self._parameters: set[int] = set()
        self._warned: set[str] = set()
        pool = memory.pool() if trim else None
        if pool is not None:
            pool.enter()
            weakref.finalize(self, pool.leave)
        if optimizer is not None:
            _tell_of_steps(optimizer, self)

    # ---- the with block

    def __enter__(self) -> ActivationCompressor:
        with self._lock:
            if self._saw_start is None:
                self._saw_start = self._optimizer is not None and not any(
                    bounds.momentum(self._optimizer, parameter) for parameter in self._model.parameters()
                )
            if self._n_inside == 0:
                self._attach()
            self._n_inside += 1
        if not self._pass.contexts:
            self._pass.tally = _Tally()
        context = contextlib.ExitStack()
        context.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        self._pass.contexts.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = self._pass
        state.contexts.pop().close()
        try:
            self._resume(is_pooling=False)
            self._settle()
            self._give_up(0)
        finally:
            if not state.contexts:
                state.stack.clear()
                state.waiting.clear()
                state.pictures = state.norm = None
                if kind is None:
                    self._n_passes += 1
                    self._counts.end(state.tally)
                    self._warn()
                state.tally = _Tally()
            with self._lock:
                self._n_inside -= 1
                if self._n_inside == 0:
                    self._detach()

    def _attach(self) -> None:
        """Hooks on the modules are there only while someone is inside, so that models can be pickled and compiled."""
        storages = [*self._model.parameters(), *self._model.buffers()]
        self._parameters = {tensor.untyped_storage()._cdata for tensor in storages}
        self._hooks.append(self._model.register_forward_pre_hook(self._begins))
        for layer in self._layers.values():
            assert layer.module is not None
            self._hooks.append(layer.module.register_forward_pre_hook(self._enters))
            self._hooks.append(layer.module.register_forward_hook(self._leaves, always_call=True))

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begins(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not self._pass.contexts:
            return
        for x in inputs:
            if isinstance(x, Tensor) and x.dim():
                self._batch = x.shape[0]
                break

    def _enters(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not self._pass.contexts:
            return
        size = inputs[0].numel() if inputs and isinstance(inputs[0], Tensor) else 0
        self._pass.stack.append((self._layers[id(module)], module, size))
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        self._pass.norm = prediction.Norm() if is_norm else None

    def _leaves(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self._pass.contexts:
            return
        stack = self._pass.stack
        while stack and stack.pop()[1] is not module:
            pass  # left by an exception
        layer = self._layers[id(module)]
        norm, self._pass.norm = self._pass.norm, None
        if norm is not None:
            norm.leaves(module, output)
        if not (self._is_measuring() and layer.has_theory and isinstance(output, Tensor) and output.requires_grad):
            return
        with torch.no_grad():
            inverse = bounds.inverse_deviation(module, inputs[0])

        def collect(gradient: Tensor) -> None:
            squares = bounds.mean_squares(module, gradient, inverse)
            off = _off(gradient, norm, inverse) if norm is not None and inverse is not None else None
            with self._lock:
                layer.squares += squares
                if off is not None:
                    layer.off = off if layer.off is None else layer.off.add(off)

        output.register_hook(collect)

    # ---- bounds

    def _is_measuring(self) -> bool:
        """Whether this step's gradients set new bounds: after 1, 2, 4, ... steps, then every `every`."""
        if self.error_bound != "auto":
            return False
        step = self._n_steps + 1
        return step % self.every == 0 or (step < self.every and step & (step - 1) == 0)

    def _is_new_scale(self) -> bool:
        step = self._n_steps + 1
        return step % self.every == 0 or (step < self.every and step & (step - 1) == 0)

    def _stepped(self) -> None:
        """After the optimizer's step. A DistributedOptimizer calls it twice for one: no pass came between."""
        with self._lock:
            if self._n_passes == 0:
                return
            self._n_passes = 0
            if self.error_bound == "auto":
                assert self._optimizer is not None
                scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
                measuring = self._is_measuring()
                for layer in self._by_name.values():
                    self._follow_gradient(layer)
                    if measuring:
                        n_steps = self._n_steps + 1 if self._saw_start else None
                        bounds.refresh(layer, self._optimizer, self.share, scale, n_steps)
            self._n_steps += 1

    def _follow_gradient(self, layer: Layer) -> None:
        weight = layer.weight
        if weight is None or weight.grad is None or not layer.has_theory:
            return
        assert self._optimizer is not None
        if bounds.momentum(self._optimizer, weight) is None:
            size = float(weight.grad.detach().abs().mean())
            if math.isfinite(size):
                layer.gradient = bounds.KEPT * layer.gradient + (1 - bounds.KEPT) * size if layer.gradient else size

    def _bound(self, layer: Layer, flat: Tensor) -> float:
        """The bound for a tensor that this layer saves.

        Layers with a theory save one, their input, whose size is measured now and then. What others save may be of any
        size, so each tensor is measured.
        """
        if isinstance(self.error_bound, (int, float)) and not self.relative:
            return float(self.error_bound)
        if not layer.has_theory:
            scale = _rms(flat)
            share = self.error_bound if isinstance(self.error_bound, (int, float)) else bounds.OTHER
            bound = share * scale if math.isfinite(scale) else 0.0
        else:
            if not layer.scale or self._is_new_scale():
                scale = _rms(flat)
                layer.scale = scale if math.isfinite(scale) else layer.scale
            if isinstance(self.error_bound, (int, float)):
                bound = self.error_bound * layer.scale
            else:
                bound = layer.default if layer.bound is None else layer.bound
        for name in layer.partners:
            other = self._by_name[name].bound
            if other is not None:
                bound = min(bound, other)
        if layer.follower is not None:
            name, factor = layer.follower
            other = self._by_name[name].bound
            if other is not None and bound / FINER < factor * other < bound:
                bound = factor * other
        return bound

    # ---- saving

    def _pack(self, tensor: Tensor) -> Any:
        start = time.perf_counter()
        state = self._pass
        layer, _, n_input = state.stack[-1] if state.stack else (self._rest, None, 0)
        data = tensor.detach()
        storage = data.untyped_storage()
        if storage._cdata in self._parameters or self._is_cast_weight(layer, data):
            return Kept(data)
        plain = type(data) is Tensor and data.layout == torch.strided
        size = data.numel()
        if state.norm is not None and plain and data.dim() == 1 and size != n_input and not data.is_cuda:
            state.norm.statistics.append(data)
        if not plain or size < self.min_size or data.device.type not in ("cpu", "cuda"):
            return self._keep(layer, data, storage)
        if layer.is_normalising and size != n_input:
            return self._keep(layer, data, storage)
        if data.dtype == torch.int64 and state.pictures is not None:
            packed = codec.pack_pool(data.contiguous(), state.pictures) if flat_view(data) is not None else None
            if packed is not None:
                self._resume(is_pooling=True)
                entry = Entry(layer.name, data, storage)
                entry.store_indices(*packed, data)
                return self._handle(layer, entry, data, start)
        if data.dtype != torch.bool and not codec.is_supported(data):
            return self._keep(layer, data, storage)
        state.pictures = data.shape if data.dtype != torch.bool else None
        flat = flat_view(data)
        if flat is None:
            return self._keep(layer, data, storage)
        need = _need(layer, tensor)
        parts = prediction.arguments(tensor) if need == MASK and not data.is_cuda else []
        key: tuple[Any, ...] = (storage._cdata, data._version, data.storage_offset(), size, data.dtype)
        if flat.untyped_storage()._cdata != storage._cdata:
            key = (*key, data.shape, data.stride())  # a copy: the layout counts
        with self._lock:
            self._resume(is_pooling=False)
            self._give_up(3)
            found = self._entries.get(key)
            if found is None or found is not state.pending:
                self._settle()
            if found is None:
                found = self._entries[key] = Entry(layer.name, data, storage)
            if need == VALUES and found.need < VALUES and layer is self._rest and 3 <= data.dim() <= 4:
                found.wait(flat)
                state.postponed = (found, flat, _moment())
            elif not self._wait(found, layer, flat):
                self._provide(found, layer, need, flat)
            if need == MASK and not data.is_cuda:
                self._foresee(found, tensor, flat, parts)
            elif state.norm is not None:
                state.norm.saves(found, data)
            found.n_uses += 1
        return self._handle(layer, found, data, start)

    def _provide(self, entry: Entry, layer: Layer, need: int, flat: Tensor) -> None:
        """Make the entry hold what is needed; masks wait for the next tensor, as values of the same one may be next."""
        if need < VALUES:
            if need > entry.need:
                entry.need = need
                entry.wait(flat)
                self._pass.pending = entry
            return
        bound = self._bound(layer, flat) if flat.dtype != torch.bool else 0.0
        self._give_up(0, entry)
        if entry.need == VALUES:
            if entry.bound is not None and entry.bound <= bound and not entry.coarse:
                return
            bound = bound if entry.bound is None else min(bound, entry.bound)
            if entry.layer != layer.name:
                self._by_name[entry.layer].partners.add(layer.name)
        elif entry.need == MASK:
            entry.layer = layer.name  # the values are this layer's
        entry.need = VALUES
        guide, tries = entry.guide, self._is_new_scale()
        used = entry.store_values(flat, bound, guide if layer.predicts or tries else None, both=tries)
        if guide is not None and tries:
            layer.predicts = used
        if used and guide is not None:
            self._tighten(guide, layer.name)
        if entry is self._pass.pending:
            self._pass.pending = None

    # ---- what is stored already tells of what comes next

    def _wait(self, entry: Entry, layer: Layer, flat: Tensor) -> bool:
        """Whether a batch norm's input waits for the mask of the ReLU behind, which allows for a wider bound."""
        if self._pass.norm is None or not layer.off_bound or entry.need != NOTHING or flat.is_cuda:
            return False
        bound = self._bound(layer, flat)
        coarse = bounds.coarse_for(layer.off_bound, bound)
        if not coarse:
            return False
        entry.need, entry.bound = VALUES, bound
        entry.wait(flat)
        self._pass.waiting.append(_Waiting(entry, flat, bound, coarse))
        return True

    def _tighten(self, guide: codec.Guide, name: str) -> None:
        """Bounds of batch norms follow what they predict: a little finer, the prediction is near enough."""
        for source in guide.sources:
            layer = self._by_name.get(source.name)
            if layer is not None and source.scale is not None:
                size = float(source.scale.abs().quantile(QUANTILE))
                layer.follower = (name, (SUM if len(guide.sources) > 1 else 1.0) / size) if size > 0 else None

    def _give_up(self, age: int, only: Entry | None = None) -> None:
        """Store what has waited for longer than that, or one entry, without a mask."""
        waiting, self._pass.waiting = self._pass.waiting, []
        for w in waiting:
            if (only is None and w.age >= age) or w.entry is only:
                w.entry.store_values(w.flat, w.bound)
            else:
                w.age += only is None
                self._pass.waiting.append(w)

    def _foresee(
        self, entry: Entry, relu: Tensor, flat: Tensor, parts: list[prediction.Norm | prediction.Result]
    ) -> None:
        """A ReLU saves its result: its mask serves what it was made of, and that will predict it."""
        prediction.remember(relu, entry)
        norms = {id(part.entry()): part for part in parts if isinstance(part, prediction.Norm) and part.entry}
        if not parts or entry.guide is not None:
            return
        mask = codec.pack_mask(flat, positive=True)
        waiting, self._pass.waiting = self._pass.waiting, []
        for w in waiting:
            if id(w.entry) in norms:
                w.entry.store_values(w.flat, w.bound, codec.Guide(mask, w.coarse))
            else:
                self._pass.waiting.append(w)
        for norm in norms.values():
            norm.mask = mask
        entry.guide = prediction.guide(parts, mask)

    def _resume(self, is_pooling: bool) -> None:
        """Outside of modules, what saved the tensor before shows only now: `F.max_pool2d` saves its indices next."""
        postponed, self._pass.postponed = self._pass.postponed, None
        if postponed is not None:
            entry, flat, moment = postponed
            if is_pooling and moment == _moment():
                entry.need = max(entry.need, SHAPE)
                self._pass.pending = entry
                self._settle()
            else:
                self._provide(entry, self._rest, VALUES, flat)

    def _settle(self) -> None:
        """The tensor that waited is not asked for its values: a mask, or its shape, is enough."""
        entry, self._pass.pending = self._pass.pending, None
        if entry is not None:
            entry.settle()

    def _is_cast_weight(self, layer: Layer, data: Tensor) -> bool:
        """Whether it is a copy of the layer's own weight, which autocast makes."""
        if layer.module is None:
            return False
        for parameter in layer.module.parameters(recurse=False):
            if data.numel() == parameter.numel() and data.dtype != parameter.dtype:
                if data.shape in (parameter.shape, parameter.shape[::-1]):
                    return True
        return False

    def _keep(self, layer: Layer, data: Tensor, storage: torch.UntypedStorage) -> Kept:
        self._pass.tally.keep(layer.name, data, storage)
        return Kept(data)

    def _handle(self, layer: Layer, entry: Entry, data: Tensor, start: float) -> Handle:
        self._pass.tally.pack(entry)
        entry.trims = self.trim and entry.n_bytes >= memory.LARGE
        if entry.trims:
            memory.trim()
        self._counts.add_time(layer.name, time.perf_counter() - start)
        return Handle(entry, data, functools.partial(self._counts.add_time, layer.name))

    # ---- what it buys

    def stats(self) -> dict[str, Any]:
        """Of the last pass: `saved_bytes` (what plain training keeps), `stored_bytes`, `ratio`, and `layers`.

        A layer has `bound`, `off_bound` (where the ReLU behind a batch norm is off), `predicted` (whether from what
        else is stored), `saved_bytes`, `stored_bytes`, `ratio`, `seconds` (compressing and decompressing, mean per
        pass) and, with "auto", `share`: the predicted error of its weight's gradient over the mean |momentum|. A
        tensor that several layers save counts once, for the first. Parameters do not count.
        """
        with self._lock:
            layers: dict[str, dict[str, Any]] = {}
            for name, (saved, stored) in self._counts.last.items():
                layer = self._by_name[name]
                layers[name] = {
                    "bound": self._counts.bounds.get(name),
                    "off_bound": self._counts.off_bounds.get(name),
                    "predicted": name in self._counts.predicted,
                    "share": layer.share,
                    "saved_bytes": saved,
                    "stored_bytes": stored,
                    "ratio": saved / stored if stored else None,
                    "seconds": self._counts.seconds.get(name, 0.0) / max(self._counts.n_passes, 1),
                }
            saved = sum(layer["saved_bytes"] for layer in layers.values())
            stored = sum(layer["stored_bytes"] for layer in layers.values())
            return {
                "saved_bytes": saved,
                "stored_bytes": stored,
                "ratio": saved / stored if stored else None,
                "batch_size": self._batch,
                "steps": self._n_steps,
                "layers": layers,
            }

    def report(self, path: str | Path, title: str = "Activations") -> None:
        """Write the page on `stats()`: sizes, ratios, bounds and times of all layers."""
        from horovod_aps.activations import report

        report.write(self.stats(), path, title)

    def suggest_batch_size(self, limit_gb: float) -> int:
        """The largest batch that should fit into `limit_gb` (10^9 bytes) with compression, from the last pass.

        Counted are parameters, their gradients, the optimizer's state, what is stored for backward, and room for
        layers at work: four times the largest tensor that was saved. Not counted: Python, libraries and data.
        """
        if not (isinstance(limit_gb, (int, float)) and limit_gb > 0):
            raise ValueError(f"suggest_batch_size: limit_gb must be a positive number, got {limit_gb!r}")
        stats = self.stats()
        if not stats["batch_size"] or not stats["saved_bytes"]:
            raise RuntimeError("suggest_batch_size: no forward pass has been seen yet")
        fixed = 0
        for parameter in self._model.parameters():
            fixed += parameter.nbytes * (2 if parameter.requires_grad else 1)
            state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
            fixed += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        sample = (stats["stored_bytes"] + 4 * self._counts.largest) / stats["batch_size"]
        return max(0, math.floor((limit_gb * 1e9 - fixed) / sample))

    def _warn(self) -> None:
        for name, (saved, stored) in self._counts.last.items():
            bound = self._counts.bounds.get(name)
            if bound and saved < MIN_RATIO * stored and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"ActivationCompressor: what layer {name} saves compresses only {saved / stored:.2f}x "
                    f"(bound {bound:.3g}); a larger bound or share would help, or leave the layer to plain training",
                    stacklevel=3,
                )


class _Tally:
    """What one pass has saved so far."""

    def __init__(self) -> None:
        self.entries: list[weakref.ref[Entry]] = []
        self.kept: dict[str, int] = {}
        self._seen: dict[tuple[int, int], StorageWeakRef] = {}  # the reference keeps the address from being used again
        self._known: weakref.WeakSet[Entry] = weakref.WeakSet()

    def keep(self, name: str, data: Tensor, storage: torch.UntypedStorage) -> None:
        key = (storage._cdata, data._version)
        if key not in self._seen:
            self._seen[key] = StorageWeakRef(storage)
            self.kept[name] = self.kept.get(name, 0) + data.nbytes

    def pack(self, entry: Entry) -> None:
        if entry not in self._known:
            self._known.add(entry)
            self.entries.append(weakref.ref(entry))


class _Counts:
    """Bytes of the last pass, and seconds of all, by layer."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, int]] = {}
        self.bounds: dict[str, float] = {}
        self.off_bounds: dict[str, float] = {}
        self.predicted: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.n_passes = 0
        self.largest = 0
        self._lock = threading.Lock()

    def add_time(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def end(self, tally: _Tally) -> None:
        totals = {name: [size, size] for name, size in tally.kept.items()}
        bounds: dict[str, float] = {}
        off_bounds: dict[str, float] = {}
        predicted: set[str] = set()
        for reference in tally.entries:
            entry = reference()
            if entry is None:  # its graph is gone already
                continue
            total = totals.setdefault(entry.layer, [0, 0])
            total[0] += entry.n_bytes
            total[1] += entry.stored_bytes
            self.largest = max(self.largest, entry.n_bytes)
            if entry.bound is not None:
                bounds[entry.layer] = max(entry.bound, bounds.get(entry.layer, 0.0))
                if entry.coarse:
                    off_bounds[entry.layer] = max(entry.bound * 2**entry.coarse, off_bounds.get(entry.layer, 0.0))
            if entry.is_predicted:
                predicted.add(entry.layer)
        with self._lock:
            self.last = {name: (saved, stored) for name, (saved, stored) in totals.items()}
            self.bounds, self.off_bounds, self.predicted = bounds, off_bounds, predicted
            self.n_passes += 1


def _rms(flat: Tensor) -> float:
    """Root mean square."""
    with torch.no_grad():
        return float(torch.linalg.vector_norm(flat.float())) / math.sqrt(flat.numel())


def _moment() -> int:
    """How many nodes of graphs this thread has made: what one operation saves, it saves at the same moment."""
    return torch.autograd._get_sequence_nr()


def _need(layer: Layer, tensor: Tensor) -> int:
    """What backward will ask of the tensor: values, the mask of a ReLU, or nothing but its shape.

    A mask only for the ReLU itself. Others that save its result need values, and may come first: the ReLU may have run
    outside of the `with` block or in a checkpointed region, or it is backward that saves again for another one.
    """
    node: Any = tensor.grad_fn
    if node is not None and node.name() == "ReluBackward0" and node._sequence_nr() == _moment() - 1:
        if node._saved_result is None:  # numbers are a thread's own; this is what the ReLU saves just now
            return MASK
    return SHAPE if type(layer.module) in _POOLS else VALUES


def _off(gradient: Tensor, norm: prediction.Norm, inverse: Tensor) -> bounds.Off:
    """What a batch norm's loss gradient tells of places where the ReLU behind it is off."""
    if not prediction.is_zero_where_off(gradient, norm):
        return bounds.Off(is_zero=False)
    others = [d for d in range(gradient.dim()) if d != 1]
    squares = torch.linalg.vector_norm(gradient.detach().float(), dim=others).square()
    return bounds.Off(True, gradient.numel() // gradient.shape[1], squares, inverse.reshape(-1))


def _unpack(packed: Handle | Kept) -> Tensor:
    return packed.tensor()
