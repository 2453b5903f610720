"""`module.set_custom_reduce_scatter(APSReduceScatter(...))` for FSDP2's `fully_shard`.

Oracles: FSDP2 without it on the same model; the format itself, block by block, in NumPy (`reference`); for other
formats all ranks emulated in one process.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from all_formats import every_format
from ddp_common import loss_of, make_model, start
from exchange_oracle import assert_same_bits, reduce_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.reductions.owners import Owners
from horovod_aps.formats import MX, Format
from horovod_aps.fsdp import APSReduceScatter, PackedReduceScatter
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport

start()
RANK, SIZE = dist.get_rank(), dist.get_world_size()
MESH = init_device_mesh("cpu", (SIZE,))
FINE = (8, 23)  # what float32 has


def shard(module: nn.Module, comm: APSReduceScatter | None, **keywords) -> nn.Module:
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=MESH, **keywords)
    fully_shard(module, mesh=MESH, **keywords)
    for one in module.modules():
        if comm is not None and isinstance(one, FSDPModule):
            one.set_custom_reduce_scatter(comm)
    return module


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_fully_shard_trains_as_without(dtype, error):
    policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
    ours, plain = shard(make_model(), APSReduceScatter(*FINE, block=100), **policy), shard(make_model(), None, **policy)
    for number in range(3):
        for module in (ours, plain):
            module.zero_grad()
            loss_of(module, number, RANK).backward()
        found, wanted = gradients(ours), gradients(plain)
        for name, exact in wanted.items():
            assert float((found[name] - exact).norm()) <= error * float(exact.norm()), (number, name)


def test_training_with_4_3_converges():
    comm = APSReduceScatter(4, 3)
    module = shard(make_model(), comm)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    losses = []
    for number in range(60):
        optimizer.zero_grad()
        loss = loss_of(module, number % 4, RANK)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    # one phase of packed bytes, against two of a float32 all-reduce
    assert comm.stats()["ratio"] < 0.16


@pytest.mark.parametrize("n", [1, 7, 1023, 1025])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PREMUL_SUM"])
def test_reduce_scatter_equals_the_simulation_block_by_block(n, op):
    block, fmt = 256, reference.Format(4, 3)
    comm = APSReduceScatter(4, 3, block=block)
    every = [np.random.default_rng(100 * n + rank).standard_normal(SIZE * n).astype(np.float32) for rank in range(SIZE)]
    every[0][:1] *= 1000  # blocks have scales of their own
    factor = {"SUM": 1.0, "AVG": 1 / SIZE, "PREMUL_SUM": 0.125}[op]
    kind = dist.ReduceOp.PREMUL_SUM(0.125) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)
    for _ in range(2):
        output = comm.allocate((n,), dtype=torch.float32, device=torch.device("cpu"))
        whole = torch.from_numpy(every[RANK].copy())
        assert comm(output, whole, dist.group.WORLD, kind) is None
        assert_same_bits(whole.numpy(), every[RANK])
        for begin in range(0, n, block):
            part = slice(RANK * n + begin, RANK * n + min(begin + block, n))
            wanted = reference.one_phase([one[part] for one in every], fmt, factor)
            assert_same_bits(output.numpy()[begin : begin + block], wanted, f"{n} {begin}")


def formats_without_feedback() -> list[Format]:
    return [fmt for fmt in every_format() if not fmt.needs_error_feedback]


@pytest.mark.parametrize("fmt", formats_without_feedback(), ids=str)
def test_every_format_equals_emulation(fmt):
    n, block, factor = 1100, 500, 1 / SIZE
    every = [np.random.default_rng([7, rank]).standard_normal(SIZE * n).astype(np.float32) for rank in range(SIZE)]
    names = [(owner, start) for start in range(0, n, block) for owner in range(SIZE)]
    parts = {(o, s): slice(o * n + s, o * n + min(s + block, n)) for o, s in names}
    options = Options(format=fmt, seed=5, hierarchy="flat")
    ranks = [Exchange(CpuKernels(), one, options, choose_reduction=Owners) for one in LocalTransport.world(SIZE)]
    comm = PackedReduceScatter(str(fmt), block=block, seed=5)
    for _ in range(2):  # stochastic rounding is another in the second
        output = torch.empty(n)
        comm(output, torch.from_numpy(every[RANK].copy()), dist.group.WORLD, dist.ReduceOp.AVG)
        wanted = reduce_all([{f"{n}.{s}.{o}": one[parts[o, s]] for o, s in names} for one in every], ranks, factor)
        for begin in range(0, n, block):
            assert_same_bits(output.numpy()[begin : begin + block], wanted[RANK][f"{n}.{begin}.{RANK}"], f"{begin}")


def test_mx_has_scales_within_a_block():
    n, fmt = 1025, MX(4, 3)
    every = [np.random.default_rng(rank).standard_normal(SIZE * n).astype(np.float32) for rank in range(SIZE)]
    every[0][:1] *= 1e6
    output = torch.empty(n)
    PackedReduceScatter(fmt)(output, torch.from_numpy(every[RANK]), dist.group.WORLD, dist.ReduceOp.SUM)
    rounded = [fmt.quantize(one[RANK * n : (RANK + 1) * n]) for one in every]
    assert_same_bits(output.numpy(), functools.reduce(np.add, rounded))


def test_nan_stays_in_its_block():
    comm = APSReduceScatter(4, 3, block=100)
    whole = torch.ones(SIZE * 300)
    if RANK == SIZE - 1:
        whole[150] = float("inf")
    output = torch.empty(300)
    work = comm(output, whole, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True)
    assert work.wait() and work.is_completed()
    bad = torch.zeros(300, dtype=torch.bool)
    bad[100:200] = RANK == 0
    assert torch.equal(output.isnan(), bad)
    assert torch.equal(output[~bad], torch.full_like(output[~bad], SIZE))


def test_errors_reach_all_ranks():
    comm = APSReduceScatter(4, 3 if RANK == 0 else 2)
    with pytest.raises(ValueError, match="APSReduceScatter: option m is 3 on rank 0 and 2 on rank 1"):
        comm(torch.empty(5), torch.ones(5 * SIZE), dist.group.WORLD, dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="must have .* chunks of 4 elements"):
        comm(torch.empty(4), torch.ones(5), dist.group.WORLD, dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="APSReduceScatter: input and output must be contiguous"):
        comm(torch.empty(5), torch.ones(5 * SIZE, 2)[:, 0], dist.group.WORLD, dist.ReduceOp.SUM)
    with pytest.raises(TypeError, match="one dtype, got torch.bfloat16 and torch.float32"):
        comm(torch.empty(5), torch.ones(5 * SIZE, dtype=torch.bfloat16), dist.group.WORLD, dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="op must be SUM or AVG"):
        comm(torch.empty(5), torch.ones(5 * SIZE), dist.group.WORLD, dist.ReduceOp.MAX)
    for wrong in ({"error_feedback": True}, {"overrides": {"a": (4, 3)}}, {"block": 0}, {"hierarchy": "two-level"}):
        with pytest.raises(ValueError, match=f"APSReduceScatter: {next(iter(wrong))}"):
            APSReduceScatter(4, 3, **wrong)
    with pytest.raises(ValueError, match="PackedReduceScatter: format must do without error feedback.* got onebit"):
        PackedReduceScatter("onebit")
    with pytest.raises(ValueError, match="PackedReduceScatter: format must be one of .* got 'e9'"):
        PackedReduceScatter("e9")
    for comm in (APSReduceScatter(4, 3, block=7), PackedReduceScatter("mx-e4m3", block=7)):
        assert copy.deepcopy(comm)._block == 7 and repr(copy.deepcopy(comm)) == repr(comm)
