"""The compressors for PyTorch: Horovod's Compressor interface on one side, the exchange on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from horovod.torch.compression import Compressor

from horovod_aps.engine import progress
from horovod_aps.engine.exchange import Exchange
from horovod_aps.errors import LostPeer, for_users
from horovod_aps.frontends import checks
from horovod_aps.frontends.compressor import BaseCompressor, ByBits
from horovod_aps.frontends.reducer import Reducer, ReducerKey
from horovod_aps.frontends.tensors import DTYPE_CODES, with_tensors
from horovod_aps.frontends.world import mpi_usable, process_set_of
from horovod_aps.kernels import for_torch
from horovod_aps.kernels.for_torch import on
from horovod_aps.torch import operations, seam
from horovod_aps.torch.carrier import TorchCarrier
from horovod_aps.torch.gradient import Gradient
from horovod_aps.torch.suspicion import Suspicion
from horovod_aps.torch.ticket import COLLECTIVE, Ticket, TicketHandle, TicketOffice
from horovod_aps.transports.collective import LATER, NEVER, NOW, CollectiveTransport

MAX_MET = 256  # groups, as programs may name them as they like


@dataclass
class _Batch:
    """Tensors that share a ticket: a group, or all single ones that were handed in since the last results were taken.

    The first result that is taken closes it; what is handed in later has another ticket.
    """

    process_set_id: int
    members: tuple[int, ...]
    device: torch.device
    world: Any
    reducer: Reducer
    ticket: Ticket = field(init=False)
    handle: TicketHandle = field(init=False)
    closed: bool = False
    group: list[Gradient] | None = None
    n_unnamed: int = 0
    suspicion: Suspicion | None = None
    """While ranks have not met yet in this reducer, or group."""
    size: int = field(init=False)
    """How many ranks take part."""
    is_cpu: bool = field(init=False)
    is_simple: bool = field(init=False)
    """Whether layers go straight to the reducer, and results need nothing but to be there."""
    is_settled: bool = False
    """Whether nothing is left to do for layers whose results are there."""
    refusal: str = ""
    """Why none of it was sent, once that is known."""

    def __post_init__(self) -> None:
        self.size = len(self.members)
        self.is_cpu = self.device.type == "cpu"
        self.is_simple = self.size > 1 and self.is_cpu


class PackedCompressor(BaseCompressor, Compressor):
    __doc__ = BaseCompressor.__doc__

    def _start(self) -> None:
        super()._start()
        self._batches: dict[tuple[int, torch.device], _Batch] = {}
        self._latest: _Batch | None = None  # of single tensors
        self._shared_world: Any = None  # one with several ranks
        self._world: Any = None
        self._n_unnamed_groups = 0
        self._met: set[Any] = set()  # where ranks have been waited for once in this world
        self._devices: list[torch.device] = []  # in the order in which this world has seen them
        if mpi_ops.is_initialized() and mpi_ops.size() == 1:  # Horovod's optimizer would never call it
            checks.refuse_alone(self._options)
        seam.register()

    # ---- Horovod's interface ------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[Any, Gradient | None]:
        """Mark a floating-point tensor for the exchange; others are left to Horovod, as by its own compressors.

        Horovod takes what is returned for a tensor; it is one where autograd goes on.
        """
        if tensor is None:  # it is `self`: the class was passed, as one passes hvd.Compression.fp16
            raise TypeError(checks.NO_INSTANCE)
        if self._shared_world is not mpi_ops._handle_map:  # hvd.init() makes a new one
            if mpi_ops.size() == 1:
                checks.refuse_alone(self._options)
                return tensor, None
            self._shared_world = mpi_ops._handle_map
        dtype = DTYPE_CODES.get(tensor.dtype)
        if dtype is None:
            if tensor.dtype.is_floating_point:
                raise checks.wrong_dtype(tensor.dtype)
            return seam.wire(tensor), None
        is_cpu = tensor.is_cpu
        if not is_cpu:
            for_torch.refuse_capture(tensor.device)
        try:
            is_as_stored = tensor.is_contiguous() and not tensor.is_neg()
        except RuntimeError:  # some sparse ones cannot say
            is_as_stored = False
        if not is_as_stored and tensor.layout is not torch.strided:
            raise checks.wrong_layout(tensor.layout)
        staged = tensor if is_as_stored else tensor.contiguous().resolve_neg()
        gradient = Gradient(tensor, staged, dtype, is_cpu, self)
        if not (tensor.requires_grad or torch.is_grad_enabled()):  # another tensor of its group may
            return gradient, gradient
        wired = seam.wire(staged)
        wired.aps_context = gradient
        return wired, gradient

    def decompress(self, tensor: torch.Tensor, ctx: Gradient | None) -> torch.Tensor:
        """The reduced tensor; the first call after a batch was submitted exchanges all of it."""
        if ctx is None:
            return seam.plain(tensor)
        batch, staged = ctx.batch, ctx.staged
        if batch is None:
            raise ValueError(
                "APSCompressor: this tensor was compressed but not all-reduced through us; op must be "
                "Average or Sum, and hvd.DistributedOptimizer(op=hvd.Adasum) is not supported"
            )
        if not (batch.is_settled and ctx.done):
            try:
                self._finish(ctx)
            except LostPeer as error:
                raise for_users(error, self._options.who, HorovodInternalError) from None
        if ctx.result is staged and staged is not ctx.original:  # in place, through a contiguous copy
            ctx.original.copy_(staged)
            return ctx.original
        if tensor is not None and tensor.requires_grad:  # keep autograd's link
            return tensor.as_subclass(torch.Tensor)
        return ctx.result

    def state_dict(self) -> dict[str, Any]:
        """As of `BaseCompressor`, with the residuals as tensors, which `torch.load` takes without asking."""
        return with_tensors(super().state_dict())

    # ---- The seam: tensors come in ------------------------------------------------------------------------

    def _submit_group(
        self,
        tensors: Sequence[seam.Wired],
        outputs: Sequence[torch.Tensor],
        names: Sequence[str | None],
        group: str | None,
        op: int,
        factor: float,
        process_set_id: int,
    ) -> int:
        """Take a group that Horovod hands us, and return a handle that it can wait for. Never blocks."""
        if op not in (mpi_ops.Average, mpi_ops.Sum):
            raise checks.wrong_op(op, mpi_ops)
        batch = self._new_batch(process_set_id, tensors[0].device, self._group_label(group), len(tensors))
        if op == mpi_ops.Average:
            factor /= batch.size
        layers: list[Gradient] = [tensor.aps_context for tensor in tensors]
        for layer, tensor, output, name in zip(layers, tensors, outputs, names):
            layer.hand_in(name or self._next_name(batch), factor, tensor, output, batch)
            layer.group_size = len(layers)
        batch.group = layers
        if batch.suspicion is not None and group is not None:
            batch.suspicion.note(group)
        self._hand_in(batch, layers)
        return batch.handle

    def _submit_one(
        self,
        gradient: Gradient,
        tensor: seam.Wired,
        output: torch.Tensor,
        name: str | None,
        op: int,
        factor: float,
        process_set_id: int,
    ) -> int:
        """As `_submit_group`, for a tensor by itself: there may be thousands of small ones."""
        average = op == mpi_ops.Average
        if not average and op != mpi_ops.Sum:
            raise checks.wrong_op(op, mpi_ops)
        batch = self._latest
        if (
            batch is None
            or batch.closed
            or batch.process_set_id != process_set_id
            or batch.world is not mpi_ops._handle_map
            or (not (batch.is_cpu and gradient.is_cpu) and batch.device != gradient.staged.device)
        ):
            batch = self._latest = self._open_batch(process_set_id, gradient.staged.device)
        if name is None:
            name = self._next_name(batch)
        elif batch.suspicion is not None:
            batch.suspicion.note(name)
        gradient.hand_in(name, factor / batch.size if average else factor, tensor, output, batch)
        if batch.is_simple:
            batch.reducer.submit(gradient)
        else:
            self._hand_in(batch, [gradient])
        return batch.handle

    def _group_label(self, group: str | None) -> str:
        """By name where there is one: the order in which groups fill up may differ between ranks."""
        if group is not None:
            return f".group.{group}"
        self._n_unnamed_groups += 1
        return f".noname.{self._n_unnamed_groups % 64}"

    def _next_name(self, batch: _Batch) -> str:
        """For a tensor without one."""
        if self._options.error_feedback:
            raise checks.no_name()
        batch.n_unnamed += 1
        return f"noname.{batch.n_unnamed - 1}"

    def _hand_in(self, batch: _Batch, layers: list[Gradient]) -> None:
        """Submit layers to what reduces them."""
        if batch.size == 1:  # nothing to agree on and nothing to round
            for layer in layers:
                torch.mul(layer.staged, layer.factor, out=layer.result)
                layer.done = True
        else:
            with on(batch.device):
                batch.reducer.submit(*layers)

    def _open_batch(self, process_set_id: int, device: torch.device) -> _Batch:
        """The batch of single tensors that is open, or a new one."""
        batch = self._batches.get((process_set_id, device))
        if batch is None or batch.closed or batch.world is not mpi_ops._handle_map:
            batch = self._batches[process_set_id, device] = self._new_batch(process_set_id, device, "")
        return batch

    def _new_batch(self, process_set_id: int, device: torch.device, group: str, n_grouped: int = 0) -> _Batch:
        process_set = process_set_of(mpi_ops._basics, process_set_id)
        if len(process_set.ranks) == 1:
            checks.refuse_alone(self._options)
        reducer = self._reducer(process_set, device)
        world = mpi_ops._handle_map  # hvd.init() makes a new one
        batch = _Batch(process_set_id, tuple(process_set.ranks), device, world, reducer)
        if group or not isinstance(reducer, Exchange):
            label = f"{self._name}.ticket.{process_set_id}.{self._device_label(device)}{group or '.1'}"
            packed = self._options.transport == "packed"
            batch.ticket = _ticket_maker(device, process_set_id, batch.members, packed)(label)
        else:
            assert isinstance(reducer.tickets, TicketOffice)
            batch.ticket = reducer.tickets.open()
        batch.handle = TicketHandle(batch.ticket, reducer.look_in_passing if isinstance(reducer, Exchange) else None)
        place = (process_set_id, batch.members, device, group)
        if batch.size > 1 and place not in self._met and len(self._met) < MAX_MET:
            self._met.add(place)
            batch.suspicion = Suspicion(batch.ticket, process_set_id, n_grouped)
        if isinstance(reducer, TorchCarrier):
            reducer.expect(batch.ticket)
        elif isinstance(reducer, Exchange) and batch.size > 1:
            if reducer.is_idle:  # else somebody has been seen to be there already, or is being waited for
                reducer.gate = _Gate()
            gate = reducer.gate  # another thread takes it away when it is open
            if isinstance(gate, _Gate):
                gate.add(partial(self._meet, reducer, batch))
        return batch

    def _device_label(self, device: torch.device) -> str:
        """What all ranks call a device: they have different ones, cuda:0 and cuda:1, and may have several each."""
        if device not in self._devices:
            self._devices.append(device)
        number = [one for one in self._devices if one.type == device.type].index(device)
        return f"{device.type}{number or ''}"

    def _meet(self, exchange: Exchange, batch: _Batch) -> bool:
        """Whether all ranks are known to be there; connects them if they are not."""
        if not batch.ticket.all_there():
            return False
        if exchange.transport is None:
            device = self._device_label(batch.device)
            name = f"{self._name} {batch.process_set_id} {batch.members} {device}"
            is_collective = batch.ticket.word(COLLECTIVE) == batch.size
            by_messages = is_collective or batch.device.type == "cuda"
            transport = batch.ticket.link(name, batch.members, self._options.why_flat, by_messages)
            if is_collective:
                those = operations.HorovodOperations(exchange.kernels, batch.device, batch.process_set_id)
                stem = f"{self._name}.bytes.{batch.process_set_id}.{device}"
                transport = CollectiveTransport(transport, those, stem, partial(_may_begin, exchange))
            exchange.connect(transport)
        return True

    def _reducer(self, process_set: Any, device: torch.device) -> Reducer:
        """What reduces the tensors of a process set, made anew in a new world."""
        if self._world is not mpi_ops._handle_map:
            self._world = mpi_ops._handle_map
            self._retire_all()
            self._met.clear()
            self._devices.clear()
        packed = self._options.transport == "packed"
        key = ReducerKey(process_set.process_set_id, str(device) if packed else "host", tuple(process_set.ranks))
        found = self._reducers.get(key)
        if found is not None:
            return found
        if packed:
            return self._keep(key, self._new_exchange(key, device))
        return self._keep(key, TorchCarrier(f"{self._name}.{key.process_set_id}", process_set, self._options))

    def _new_exchange(self, key: ReducerKey, device: torch.device) -> Exchange:
        new = Exchange(for_torch.kernels_for(device), None, self._options, partial(on, device), overlap=True)
        new.any_thread = device.type == "cpu"
        new.tickets = TicketOffice(
            f"{self._name}.ticket.{key.process_set_id}.{self._device_label(device)}",
            _ticket_maker(device, key.process_set_id, key.members, packed=True),
        )
        return new

    # ---- Results go out -----------------------------------------------------------------------------------

    def _finish(self, layer: Gradient) -> None:
        """Have the result of a tensor, or raise why there is none."""
        batch: _Batch = layer.batch
        if batch.group is not None:  # Horovod has waited, but not for a group that has integers as well
            batch.handle()
        batch.ticket.waited_for()
        if batch.suspicion is not None:
            batch.suspicion.end()
            batch.suspicion = None
        if batch.closed and layer.done:
            if isinstance(batch.reducer, Exchange):
                batch.reducer.kernels.end()  # PyTorch's stream may be another one now
            return
        batch.closed = True
        if layer.error is not None:
            raise layer.error
        self._check(batch)
        if batch.size > 1:
            batch.reducer.wait([layer] if batch.group is None else batch.group)
            self._look_for_idle_overrides(batch.reducer)
        batch.group = None  # its layers know the batch: only the garbage collector would find them
        batch.is_settled = batch.is_simple

    def _check(self, batch: _Batch) -> None:
        """Raise ValueError if not all ranks are there; then nothing of the batch has been sent."""
        if batch.refusal:
            raise ValueError(batch.refusal)
        try:
            batch.ticket.check()
        except ValueError as error:
            batch.refusal = str(error)
            batch.reducer.forget()
            tickets = getattr(batch.reducer, "tickets", None)
            if isinstance(tickets, TicketOffice) and batch.group is None:
                tickets.take_back()
            raise


class APSCompressor(ByBits, PackedCompressor):
    __doc__ = BaseCompressor.__doc__


class _Gate:
    """Opens as soon as one of several tickets says that all ranks are there."""

    def __init__(self) -> None:
        self._asks: list[Callable[[], bool]] = []

    def add(self, ask: Callable[[], bool]) -> None:
        self._asks.append(ask)

    def __call__(self) -> bool:
        return any(ask() for ask in self._asks)


def _may_begin(exchange: Exchange) -> int:
    """Whether operations of Horovod's may carry what the exchange holds."""
    if progress.is_waited_for(exchange):
        return NOW
    return LATER if progress.is_anyone_waiting() else NEVER


def _ticket_maker(
    device: torch.device, process_set_id: int, members: tuple[int, ...], packed: bool
) -> Callable[[str], Ticket]:
    """What opens tickets by their labels, in this world."""
    return partial(
        Ticket,
        process_set_id=process_set_id,
        rank=members.index(mpi_ops.rank()),
        size=len(members),
        packed=packed,
        speaks_mpi=not packed or mpi_usable(mpi_ops._basics),
        collective=packed and operations.are_wanted(device),
    )
