"""APSCompressor for PyTorch: Horovod's Compressor interface on one side, the exchange on the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compressor

from horovod_aps import carrier
from horovod_aps.base import BaseCompressor
from horovod_aps.exchange import Exchange, Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.torch import seam
from horovod_aps.torch.carrier import CarrierBatch
from horovod_aps.torch.horovod_transport import HorovodTransport
from horovod_aps.transport import PendingTransport
from horovod_aps.world import make_transport, mpi_usable, process_set_of

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


@dataclass(slots=True)
class _Context:
    """What `decompress` must know of one tensor; the last three once Horovod has handed it in."""

    original: torch.Tensor
    staged: torch.Tensor
    batch: _Batch | None = None
    ticket: _Ticket | None = None
    result: torch.Tensor | None = None


@dataclass
class _Ticket:
    """A Horovod operation that stands for tensors in our hands, and the word that it sums."""

    handle: int
    word: torch.Tensor | None


@dataclass
class _Batch:
    """Tensors submitted since the last flush to one exchange (or to one carrier)."""

    number: int
    world: Any
    device: torch.device
    size: int = 0  # ranks that take part
    exchange: Exchange | None = None
    carrier: CarrierBatch | None = None
    ticket: _Ticket | None = None
    flushed: bool = False
    error: BaseException | None = None
    n_unnamed: int = 0
    n_groups: int = 0
    gated: bool = False


class APSCompressor(BaseCompressor, Compressor):
    __doc__ = BaseCompressor.__doc__

    def _start(self) -> None:
        super()._start()
        self._batches: dict[tuple[int, torch.device], _Batch] = {}
        self._carriers: dict[int, CarrierBatch] = {}
        self._world: Any = None
        self._agreed: dict[int, Any] = {}  # by process set, the world in which all ranks had the same transport
        seam.register()

    # ---- Horovod's interface ------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Context | None]:
        """Mark a floating-point tensor for the exchange; others pass through, as with Horovod's compressors."""
        if not tensor.dtype.is_floating_point or mpi_ops.size() == 1:
            return tensor, None
        if tensor.dtype not in DTYPE_CODES:
            raise TypeError(f"APSCompressor: tensors must be float32, float64, float16 or bfloat16, got {tensor.dtype}")
        staged = tensor if tensor.is_contiguous() else tensor.contiguous()
        wired = seam.wire(staged, self)
        context = wired.aps_context = _Context(tensor, staged)
        return wired, context

    def decompress(self, tensor: torch.Tensor, ctx: _Context | None) -> torch.Tensor:
        """The reduced tensor; the first call after a batch was submitted exchanges all of it."""
        if ctx is None:
            return tensor
        if ctx.batch is None or ctx.ticket is None:
            raise ValueError("APSCompressor: this tensor was compressed but not all-reduced through us; op must be "
                             "Average or Sum, and hvd.DistributedOptimizer(op=hvd.Adasum) is not supported")
        self._flush(ctx.batch, ctx.ticket)
        if ctx.result is ctx.staged and ctx.staged is not ctx.original:  # in place, through a contiguous copy
            ctx.original.copy_(ctx.staged)
            return ctx.original
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:  # keep autograd's link
            return tensor.as_subclass(torch.Tensor)
        assert ctx.result is not None
        return ctx.result

    def state_dict(self) -> dict[str, Any]:
        """As of `BaseCompressor`, with the residuals as tensors, which `torch.load` takes without asking."""
        state = super().state_dict()
        residuals = {name: torch.as_tensor(values) for name, values in state["residuals"].items()}
        return state | {"residuals": residuals}

    # ---- The seam -----------------------------------------------------------------------------------------

    def _submit(self, tensors: Sequence[seam.WireTensor], outputs: Sequence[torch.Tensor],
                names: Sequence[str | None], group: str | None, op: int, factor: float, process_set_id: int,
                grouped: bool) -> int:
        """Take tensors that Horovod hands us, and return a handle that it can wait for."""
        if op not in (mpi_ops.Average, mpi_ops.Sum):
            raise ValueError(f"APSCompressor: op must be Average or Sum, got {_op_name(op)}; "
                             f"use hvd.Compression.none for it")
        batch = self._open_batch(process_set_id, tensors[0].device)
        if op == mpi_ops.Average:
            factor /= batch.size
        layers = [self._layer(batch, tensor, output, name, factor)
                  for tensor, output, name in zip(tensors, outputs, names)]
        if batch.carrier is not None:
            ticket = _Ticket(batch.carrier.submit([(layer.name, layer.keep.staged, layer.keep.result, layer.dtype,
                                                    layer.factor) for layer in layers]), None)
        else:
            shared = None if grouped else batch.ticket
            ticket = shared or self._new_ticket(batch, process_set_id, group, grouped)
            self._hand_in(batch, layers)
        for layer in layers:
            layer.keep.ticket = ticket
        return ticket.handle

    def _layer(self, batch: _Batch, tensor: seam.WireTensor, output: torch.Tensor, name: str | None,
               factor: float) -> Layer:
        """What the exchange must know of a tensor, whose context learns where its result will be."""
        context: _Context = tensor.aps_context
        if name is None:
            if self._options.error_feedback:
                raise ValueError("APSCompressor: error_feedback must know a tensor from step to step; give "
                                 "hvd.allreduce a name")
            name = f"noname.{batch.n_unnamed}"
            batch.n_unnamed += 1
        staged = context.staged
        result = staged if output is tensor else output.as_subclass(torch.Tensor)
        context.batch, context.result = batch, result
        return Layer(name, staged.shape, DTYPE_CODES[staged.dtype], staged.data_ptr(), result.data_ptr(), factor,
                     context)

    def _new_ticket(self, batch: _Batch, process_set_id: int, group: str | None, grouped: bool) -> _Ticket:
        """A ticket for the batch, or for a group alone: Horovod waits for every group by a handle of its own."""
        label = f"{self._name}.ticket.{process_set_id}.{batch.device.type}.{batch.number % 4}"
        if grouped:
            # By name where there is one: the order in which groups fill up may differ between ranks.
            label += f".noname.{batch.n_groups}" if group is None else f".group.{group}"
            batch.n_groups += group is None
        ticket = _Ticket(*seam.ticket(label, process_set_id))
        if not grouped:
            batch.ticket = ticket
        if not batch.gated:  # a rank in hvd.join() would never answer a bucket that starts in backward
            assert batch.exchange is not None
            handle, word = ticket.handle, ticket.word
            batch.exchange.gate = lambda: word is not None and mpi_ops.poll(handle) and int(word[0]) == batch.size
            batch.gated = True
        return ticket

    def _hand_in(self, batch: _Batch, layers: list[Layer]) -> None:
        """Submit layers to the exchange."""
        assert batch.exchange is not None
        if batch.size == 1:  # nothing to agree on and nothing to round
            for layer in layers:
                torch.mul(layer.keep.staged, layer.factor, out=layer.keep.result)
            return
        with _on(batch.device):
            for layer in layers:
                batch.exchange.submit(layer)

    def _open_batch(self, process_set_id: int, device: torch.device) -> _Batch:
        world = mpi_ops._handle_map  # hvd.init() makes a new one: another world
        key = (process_set_id, device)
        batch = self._batches.get(key)
        if batch is None or batch.flushed or batch.world is not world:
            if self._agreed.get(process_set_id) is not world:
                self._compare_transports(process_set_of(mpi_ops._basics, process_set_id), world)
            same_world = batch is not None and batch.world is world  # a worker that joined starts from 0 as well
            batch = _Batch(batch.number + 1 if same_world and batch is not None else 0, world, device)
            if self._options.transport == "allreduce":
                batch.carrier = self._carrier(process_set_id)
                batch.size = batch.carrier.size
            else:
                batch.exchange = self._exchange(process_set_id, device)
                batch.size = batch.exchange.transport.size
            self._batches[key] = batch
        return batch

    def _compare_transports(self, process_set: Any, world: Any) -> None:
        """At the first batch in a world: ranks with different transports would wait for each other for ever.

        Asked again as long as not all have been there: a rank in `hvd.join()` would not remember the answer.
        """
        n_present, n_packed = _count(f"{self._name}.transport", self._options.transport == "packed", process_set)
        carrier.check_transports(n_packed, n_present)
        if n_present == process_set.size():
            self._agreed[process_set.process_set_id] = world

    def _carrier(self, process_set_id: int) -> CarrierBatch:
        known = self._carriers.get(process_set_id)
        process_set = process_set_of(mpi_ops._basics, process_set_id)
        if known is not None and known.size == process_set.size() and known.options is self._options:
            return known
        new = CarrierBatch(f"{self._name}.{process_set_id}", process_set, self._options, self._carrier_statistics)
        if known is not None and known.size == new.size:  # after set_format
            new.step_number = known.step_number
        self._carriers[process_set_id] = new
        return new

    def _exchange(self, process_set_id: int, device: torch.device) -> Exchange:
        if self._world is not mpi_ops._handle_map:
            self._world = mpi_ops._handle_map
            self._retire_exchanges()
        key = (process_set_id, mpi_ops.size(), mpi_ops.rank(), str(device))
        found = self._exchanges.get(key)
        if found is None:
            process_set = process_set_of(mpi_ops._basics, process_set_id)
            transport = PendingTransport(process_set.rank(), process_set.size(), lambda: make_transport(
                process_set, _all_speak_mpi(self._name, process_set),
                lambda: HorovodTransport(f"{self._name}.{process_set_id}", process_set),
                tag=8 * self._number + process_set_id))
            found = self._keep_exchange(key, _kernels_for(device), transport)
        return found

    def _flush(self, batch: _Batch, ticket: _Ticket) -> None:
        if batch.flushed:
            if batch.error is not None:
                raise batch.error
            return
        batch.flushed = True
        try:
            if batch.carrier is not None:
                batch.carrier.flush(ticket.handle)
                return
            assert batch.exchange is not None and ticket.word is not None
            try:
                _check_all_present(int(ticket.word[0]), batch.size)
            except ValueError:
                batch.exchange.forget()
                batch.number -= 1  # ranks that have joined did not count this batch
                raise
            with _on(batch.device):
                batch.exchange.flush()
        except BaseException as error:
            batch.error = error
            raise


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one while kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _kernels_for(device: torch.device) -> Any:
    """The kernels that work where the gradients are."""
    if device.type == "cpu":
        return CpuKernels()
    if device.type == "cuda":
        from horovod_aps.cuda_kernels import CudaKernels

        return CudaKernels(stream=lambda: torch.cuda.current_stream(device).cuda_stream)
    raise TypeError(f"APSCompressor: tensors must be on a CPU or a CUDA device, got {device}")


def _all_speak_mpi(name: str, process_set: Any) -> bool:
    """Whether every rank of the process set could talk MPI directly; ValueError if some of them have joined.

    Decided before anything is remembered: a rank in `hvd.join()` would not remember it.
    """
    n_present, n_able = _count(f"{name}.agree", mpi_usable(mpi_ops._basics), process_set)
    _check_all_present(n_present, process_set.size())
    return n_able == n_present


def _count(question: str, answer: bool, process_set: Any) -> tuple[int, int]:
    """How many ranks answer a question, and how many of them with yes; those in `hvd.join()` do neither."""
    words = torch.tensor([1, answer], dtype=torch.int32)
    handle = mpi_ops.allreduce_async_(words, op=mpi_ops.Sum, process_set=process_set,
                                      name=f"{question}.{process_set.process_set_id}")
    n_present, n_yes = mpi_ops.synchronize(handle).tolist()
    return n_present, n_yes


def _check_all_present(n_present: int, size: int) -> None:
    if n_present != size:
        raise ValueError(f"APSCompressor: {size - n_present} of {size} ranks are in hvd.join(), which only a plain "
                         f'all-reduce can go on without; use APSCompressor(..., transport="allreduce")')


def _op_name(op: int) -> str:
    names = {getattr(mpi_ops, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
    return names.get(op, str(op))
