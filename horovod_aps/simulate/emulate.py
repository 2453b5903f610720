"""Train as if on N ranks in one process: the gradients of N backward passes go through the real exchange.

The layers of every emulated rank are handed to `exchange.local_allreduce`, which runs the same layout,
kernels and phases as a real job and only replaces the network, so the reduced gradients are those of a real
job, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import DTYPES
from horovod_aps.kernels.for_torch import kernels_for, on
from horovod_aps.options import Options
from horovod_aps.simulate import _native

DTYPE_CODES = {getattr(torch, dtype.name): dtype.code for dtype in DTYPES}
MAX_RANKS = 256


def _as_options(value: Options | Mapping[str, Any]) -> Options:
    if isinstance(value, Mapping):
        if "format" not in value and (lacking := [name for name in ("e", "m") if name not in value]):
            raise ValueError(f"EmulatedOptimizer: compressor_options must have e and m, lacks {' and '.join(lacking)}")
        value = Options(**value)
    if not isinstance(value, Options):
        raise TypeError(
            "EmulatedOptimizer: compressor_options must be a dict of APSCompressor's arguments, got "
            f"{type(value).__name__}"
        )
    if value.transport != "packed":
        raise ValueError(
            f"EmulatedOptimizer: transport must be 'packed', the only one it emulates, got {value.transport!r}"
        )
    return value


class EmulatedOptimizer:
    """An optimizer whose step averages the gradients of `n_ranks` backward passes through the APS exchange.

        optimizer = EmulatedOptimizer(torch.optim.SGD(model.parameters(), 0.1), 8, {"e": 4, "m": 3})
        optimizer.zero_grad()
        for rank in range(8):
            loss(model, batch[rank]).backward()
            optimizer.collect()              # this was rank's gradient
        optimizer.step()

    or `optimizer.step(lambda rank: loss(model, batch[rank]))`, which does all of that and returns the mean
    loss.

    `compressor_options` are the arguments of `APSCompressor`; overrides match the names in `named_parameters`
    (by default Horovod's, "allreduce.noname.<group>.<i>"). As in Horovod a parameter without gradient counts
    as zero. Everything else (`param_groups`, `state_dict`, ...) is the wrapped optimizer's; give a scheduler
    `.optimizer`. There is one model, so batch-norm's running statistics see all ranks' batches. Parameters that
    join the optimizer or are unfrozen later need a new EmulatedOptimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        n_ranks: int,
        compressor_options: Options | Mapping[str, Any],
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    ) -> None:
        self.n_ranks = _native.check_int("EmulatedOptimizer", "n_ranks", n_ranks, 1, MAX_RANKS)
        self.optimizer, self.options = optimizer, _as_options(compressor_options)
        self._parameters = {
            name: parameter for name, parameter in self._name(named_parameters) if parameter.requires_grad
        }
        if not self._parameters:
            raise ValueError("EmulatedOptimizer: optimizer must have a parameter that requires a gradient, got none")
        for name, parameter in self._parameters.items():
            if parameter.dtype not in DTYPE_CODES:
                raise TypeError(
                    f"EmulatedOptimizer: parameter {name!r} must be of a real floating type, got {parameter.dtype}"
                )
        self._collected: list[dict[str, torch.Tensor]] = []
        self._exchanges: list[Exchange] | None = None
        # The real exchange lays layers out in the order in which backward first produced them; do as it does.
        self._order: dict[str, None] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._recorder(name))
            for name, parameter in self._parameters.items()
        ]

    def _name(self, named: Iterable[tuple[str, torch.nn.Parameter]] | None) -> list[tuple[str, torch.nn.Parameter]]:
        groups = self.optimizer.param_groups
        if named is None:
            return [
                (f"allreduce.noname.{i}.{j}", parameter)
                for i, group in enumerate(groups)
                for j, parameter in enumerate(group["params"])
            ]
        mine = {id(parameter) for group in groups for parameter in group["params"]}
        pairs = [(name, parameter) for name, parameter in named if id(parameter) in mine]
        if len({name for name, _ in pairs}) < len(mine):
            raise ValueError(
                f"EmulatedOptimizer: named_parameters must name all {len(mine)} parameters of the "
                f"optimizer, each differently, got {len(pairs)}"
            )
        return pairs

    def _recorder(self, name: str) -> Callable[[torch.Tensor], None]:
        def record(_: torch.Tensor) -> None:
            self._order.setdefault(name)

        return record

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: the object is being made without __init__
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedOptimizer:
        raise TypeError("EmulatedOptimizer: cannot be copied; wrap a copy of the optimizer in a new one")

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchange of every emulated rank, for residuals and statistics; empty before the first step."""
        return self._exchanges or []

    def collect(self) -> None:
        """Take the parameters' gradients as those of the next rank, and clear them."""
        if len(self._collected) == self.n_ranks:
            raise ValueError(f"EmulatedOptimizer: collect must be called {self.n_ranks} times per step, got one more")
        for hook in self._hooks:  # rank 0's first backward has settled the order
            hook.remove()
        self._hooks = []
        known = {id(parameter) for parameter in self._parameters.values()}
        for group in self.optimizer.param_groups:
            if any(parameter.requires_grad and id(parameter) not in known for parameter in group["params"]):
                raise ValueError(
                    f"EmulatedOptimizer: all {len(known)} trainable parameters must be there from the start, got "
                    "more that were added or unfrozen since; make a new EmulatedOptimizer"
                )
        grads = {}
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(f"EmulatedOptimizer: gradient of {name!r} must be dense, got {grad.layout}")
            # Results are written as if contiguous, whatever the parameter's own strides are.
            grads[name] = (
                torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                if grad is None
                else grad.detach().contiguous().resolve_neg()
            )
        for parameter in self._parameters.values():
            parameter.grad = None
        self._collected.append(grads)

    def reduce(self) -> None:
        """Put the average over the collected ranks, as the exchange computes it, into every `.grad`."""
        if len(self._collected) != self.n_ranks:
            raise ValueError(
                f"EmulatedOptimizer: collect must be called {self.n_ranks} times per step, got {len(self._collected)}"
            )
        collected, self._collected = self._collected, []
        names = [*self._order, *(name for name in self._parameters if name not in self._order)]
        if self.n_ranks > 1:
            layers = [[self._layer(name, grads[name]) for name in names] for grads in collected]
            device = self._device()
            with on(device):
                self._exchanges = local_allreduce(layers, self.options, kernels_for(device), self._exchanges)
        for name, parameter in self._parameters.items():
            parameter.grad = collected[0][name]

    def _device(self) -> torch.device:
        """Where the kernels are to run."""
        devices = {parameter.device for parameter in self._parameters.values()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            names = ", ".join(sorted(map(str, devices)))
            raise TypeError(f"EmulatedOptimizer: parameters must be on one CPU or CUDA device, got {names}")
        return devices.pop()

    def _layer(self, name: str, grad: torch.Tensor) -> Layer:
        """Reduced in place: the collected gradients are the emulator's own."""
        return Layer(
            name,
            tuple(grad.shape),
            DTYPE_CODES[grad.dtype],
            grad.data_ptr(),
            grad.data_ptr(),
            1.0 / self.n_ranks,
            grad,
        )

    def step(self, loss: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Reduce what was collected and update the parameters.

        With `loss`, a function of the rank, first run and collect all backward passes; returns the mean loss.
        """
        mean = None if loss is None else self._run(loss)
        self.reduce()
        self.optimizer.step()
        return mean

    def _run(self, loss: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The backward passes of all ranks; if one fails, none has been collected."""
        try:
            inspect.signature(loss).bind(0)
        except ValueError:  # a builtin does not tell
            pass
        except TypeError as error:
            raise TypeError(f"EmulatedOptimizer: loss must be a function of the rank, got {loss!r}: {error}") from None
        losses = []
        self.optimizer.zero_grad()
        try:
            for rank in range(self.n_ranks):
                value = loss(rank)
                value.backward()
                self.collect()
                losses.append(value.detach())
        except BaseException:
            self._collected = []
            self.optimizer.zero_grad()
            raise
        return torch.stack(losses).mean()
