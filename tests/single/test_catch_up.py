"""A rank that joins an elastic job late goes on where the others are. Oracle: ranks that were all there."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_oracle import assert_same_bits, make_gradients

from horovod_aps.engine.agreement import most_advanced, parse_all, proposal, spec_of
from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport


def step(exchanges: list[Exchange], seed: int) -> np.ndarray:
    """One exchange of one layer; every rank must get the same bits."""
    grads = make_gradients([100], len(exchanges), seed=seed)
    outs, layers = [], []
    for rank in grads:
        (x,) = rank.values()
        outs.append(np.empty_like(x))
        layers.append([Layer("w", x.shape, 0, x.ctypes.data, outs[-1].ctypes.data, 0.5, (x, outs[-1]))])
    local_allreduce(layers, exchanges[0].options, CpuKernels(), exchanges)
    for out in outs:
        assert_same_bits(out, outs[0])
    return outs[0]


def world(size: int, options: Options) -> list[Exchange]:
    return [Exchange(CpuKernels(), transport, options) for transport in LocalTransport.world(size)]


@pytest.mark.parametrize("newcomer", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"warmup_steps": 3},
        {"overrides": "auto", "auto_steps": 3, "auto_error": 0.3},
        {"rounding": "stochastic", "warmup_steps": 2},
    ],
    ids=str,
)
def test_newcomer_goes_on_where_the_others_are(options, newcomer):
    opts = Options(4, 3, **options)
    veterans = world(3, opts)
    for seed in range(5):
        step(veterans, seed)
    wanted = step(veterans, 5)

    before, after = world(3, opts), world(3, opts)
    for seed in range(5):
        step(before, seed)
    for rank, exchange in enumerate(after):
        if rank != newcomer:
            exchange.load_state(before[rank].state())
    result = step(after, 5)
    assert {exchange.step_number for exchange in after} == {6}
    assert_same_bits(result, wanted)


def test_newcomer_while_formats_are_still_measured():
    """The job goes on measuring, and all ranks settle on the same formats."""
    opts = Options(4, 3, overrides="auto", auto_steps=4, auto_error=0.3)
    before, after = world(3, opts), world(3, opts)
    for seed in range(2):
        step(before, seed)
    for rank in (0, 1):
        after[rank].load_state(before[rank].state())
    for seed in range(2, 7):
        step(after, seed)
    assert len({str(exchange.options.overrides) for exchange in after}) == 1
    assert isinstance(after[2].options.overrides, dict)


def test_explicit_overrides_are_never_taken_over():
    """Formats that a user has set on one rank only are a disagreement."""
    exchanges = world(2, Options(4, 3, overrides="auto"))
    exchanges[0] = Exchange(CpuKernels(), exchanges[0].transport, Options(4, 3, overrides={"w": (5, 2)}))
    with pytest.raises(ValueError, match="option overrides is"):
        step(exchanges, 0)


def test_most_advanced_is_none_for_equals():
    options = Options(4, 3)
    specs = [spec_of(Layer("w", (3,), 0, 0, 0, 1.0), options, False)]

    def positions(*ranks):
        return most_advanced(
            parse_all([proposal(specs, [1.0], options, step_number=step, chosen=chosen) for step, chosen in ranks])
        )

    chosen = {"w": [3, 0]}
    assert positions((3, None), (3, None), (3, None)) is None
    assert positions((3, None), (9, None)) == (9, None)
    assert positions((9, None), (3, chosen)) == (9, chosen)
