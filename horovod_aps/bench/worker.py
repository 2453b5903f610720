"""One rank of the synchronisation benchmark: all methods take turns on one work; rank 0 writes the result.

Started by cases.py through mpirun or horovodrun, never by hand: once with all Horovod methods, once with all
DDP methods. Those are kept apart because Horovod's background thread negotiates with the other ranks every
millisecond also when nothing is to be done, and would take a good part of a core from DDP.
"""

import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from horovod_aps.bench.cluster import interface_bytes
from horovod_aps.bench.methods import Method, make_method
from horovod_aps.bench.works import DigitsNet, GradientSource, ShapesModel, digits_batches, work_shapes

# PowerSGD sends plain gradients in its first two rounds; DDP rebuilds its buckets after the first.
N_WARM_UP = 4


class World:
    """Rank, size and small exchanges, over Horovod or, for the DDP methods, over Gloo without Horovod."""

    def __init__(self, config: dict[str, Any]) -> None:
        kinds = {name.startswith("ddp_") for name in config["methods"]}
        if len(kinds) != 1:
            raise ValueError(f"bench.worker: methods must be all DDP or all Horovod, got {config['methods']}")
        self.uses_horovod = not kinds.pop()
        if self.uses_horovod:
            import horovod.torch as hvd

            hvd.init()
            self.rank, self.size = hvd.rank(), hvd.size()
        else:
            prefix = "OMPI_COMM_WORLD" if "OMPI_COMM_WORLD_RANK" in os.environ else "HOROVOD"
            self.rank, self.size = int(os.environ[f"{prefix}_RANK"]), int(os.environ[f"{prefix}_SIZE"])
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{config['address']}:{config['port']}",
                rank=self.rank,
                world_size=self.size,
            )

    def gather(self, value: Any) -> list[Any]:
        if self.uses_horovod:
            import horovod.torch as hvd

            return list(hvd.allgather_object(value, name="benchmark.gather"))
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.uses_horovod:
            import horovod.torch as hvd

            hvd.allreduce(torch.zeros(1), name="benchmark.barrier")
        else:
            dist.barrier()

    def close(self) -> None:
        if not self.uses_horovod:
            dist.destroy_process_group()  # without it Gloo's threads now and then abort the process at its end


def _seconds_of(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Bench:
    """All methods on one work, with what is needed to run each once."""

    def __init__(self, world: World, config: dict[str, Any]) -> None:
        self.world = world
        self.work: str = config["work"]
        self.is_step = self.work == "step"
        self.in_a_row: int = config["in_a_row"]
        if self.is_step:
            self.batches = list(islice(digits_batches(world.rank, world.size), 50))
            self.methods = {name: make_method(name, self._net()) for name in config["methods"]}
        else:
            shapes = work_shapes(self.work)
            self.source = GradientSource(shapes, world.rank)
            values = [torch.zeros(shape) for _, shape in shapes]
            self.methods = {name: make_method(name, ShapesModel(self.source, values)) for name in config["methods"]}
        self.n_elements = sum(p.numel() for p in next(iter(self.methods.values())).module.parameters())
        self._position = dict.fromkeys(self.methods, 0)

    @staticmethod
    def _net() -> DigitsNet:
        torch.manual_seed(0)
        return DigitsNet()

    def run(self, method: Method) -> float:
        """Some synchronisations or steps of a method in a row, from a common start; this rank's seconds for one."""
        action = self._next(method)
        self.world.barrier()
        seconds = _seconds_of(action)
        for _ in range(self.in_a_row - 1):
            seconds += _seconds_of(self._next(method))
        return seconds / self.in_a_row

    def _next(self, method: Method) -> Callable[[], Any]:
        """Prepare a synchronisation or a step, and return what does it."""
        if self.is_step:
            position = self._position[method.name]
            self._position[method.name] += 1
            return partial(method.step, self.batches[position % len(self.batches)])
        method.clear()
        self.source.refresh()
        return partial(method.synchronise, method.model(None))

    def check(self, method: Method) -> dict[str, Any]:
        """Relative error against the exact mean, averaged over layers; whether ranks agree bit for bit."""
        method.clear()
        if self.is_step:
            exact = self._exact_step_gradients(method) if self.world.rank == 0 else []
            method.synchronise(method.model(self.batches[0]))
        else:
            self.source.refresh()
            exact = self._exact_gradients() if self.world.rank == 0 else []
            method.synchronise(method.model(None))
        results = method.gradients()
        checksum = 0
        for gradient in results:
            checksum = zlib.crc32(gradient.numpy().tobytes(), checksum)
        checksums = self.world.gather(checksum)
        errors = [
            _relative_error(gradient.flatten(), mean)
            for gradient, mean in zip(results, exact, strict=self.world.rank == 0)
        ]
        method.clear()
        return {"identical": len(set(checksums)) == 1, "error": statistics.fmean(errors) if errors else None}

    def _exact_gradients(self) -> list[Tensor]:
        if not hasattr(self, "_exact"):
            self._exact = self.source.exact_mean(self.world.size)
        return self._exact

    def _exact_step_gradients(self, method: Method) -> list[Tensor]:
        """Gradients at the method's own weights for every rank's first batch, averaged in float64."""
        twin = self._net()
        twin.load_state_dict(method.module.state_dict())
        parameters = list(twin.parameters())
        total = [torch.zeros(p.numel(), dtype=torch.float64) for p in parameters]
        for rank in range(self.world.size):
            batch = next(digits_batches(rank, self.world.size))
            for mean, gradient in zip(total, torch.autograd.grad(twin(batch), parameters), strict=True):
                mean += gradient.flatten() / self.world.size
        return total


def _relative_error(result: Tensor, exact: Tensor) -> float:
    norm = float(exact.norm())
    return float((result.double() - exact).norm()) / norm if norm else float(result.norm())


def measure(world: World, bench: Bench, config: dict[str, Any]) -> dict[str, Any]:
    """Warm up, time in turn until the budget is spent, then count bytes and errors method by method."""
    methods = list(bench.methods.values())
    for _ in range(N_WARM_UP - 1):
        for method in methods:
            bench.run(method)
    start = time.perf_counter()
    for method in methods:
        bench.run(method)
    seconds_per_round = max(world.gather(time.perf_counter() - start))
    n_rounds = int(config["budget"] / seconds_per_round)
    n_rounds = max(config["min_rounds"], min(config["max_rounds"], n_rounds))
    mine: dict[str, list[float]] = {name: [] for name in bench.methods}
    for round_number in range(n_rounds):
        # Another method goes first each time, so that none always follows the same one.
        turn = round_number % len(methods)
        for method in methods[turn:] + methods[:turn]:
            mine[method.name].append(bench.run(method))
    everyone = world.gather(mine)

    def count() -> int | None:
        return interface_bytes(config["interface"]) if config["interface"] else None

    n_synchronisations = config["byte_rounds"] * config["in_a_row"]
    results = {}
    for method in methods:
        world.barrier()
        before = count()
        for _ in range(config["byte_rounds"]):
            bench.run(method)
        world.barrier()
        after = count()
        sent = None if before is None or after is None else (after - before) / n_synchronisations
        sent_by_rank = world.gather(sent)
        results[method.name] = {
            # A synchronisation is over when the last rank has its gradients.
            "seconds": [max(times) for times in zip(*(one[method.name] for one in everyone), strict=True)],
            "bytes_by_rank": None if sent is None else sent_by_rank,
            **bench.check(method),
        }
    return {"n_elements": bench.n_elements, "n_ranks": world.size, "in_a_row": bench.in_a_row, "methods": results}


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    world = World(config)
    result = measure(world, Bench(world, config), config)
    if world.rank == 0:
        with open(config["result"], "w") as file:
            json.dump(result, file)
    world.barrier()
    world.close()


if __name__ == "__main__":
    main()
