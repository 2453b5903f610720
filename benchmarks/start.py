"""ResNet-50's gradients on two hosts, started plainly and with Open MPI's waiting set by hand, in turn.

    python benchmarks/start.py                        # 10 Gbit/s, four launches of each, about a minute; needs root

Importing horovod_aps before `hvd.init()` chooses how MPI waits where ranks have fewer cores than threads, unless the
user has (horovod_aps/frontends/idle.py). So a plain start should be as fast as one with `mpi_yield_when_idle` set to 1.
"""

import argparse
import statistics
import sys
import time

from cluster import Cluster, ClusterError

STARTS = {"plain": None, "yields, set by hand": "1", "busy, set by hand": "0"}
N_WARM_UP = 3


def synchronise(n_rounds: int) -> None:
    """One rank: print the median of its milliseconds, or of the slowest rank's if it is the first."""
    import horovod.torch as hvd
    import torch

    from horovod_aps.bench.works import work_shapes
    from horovod_aps.torch import APSCompressor

    hvd.init()
    torch.set_num_threads(1)
    gradients = [torch.randn(shape) for _, shape in work_shapes("resnet50")]
    compressor, seconds = APSCompressor(4, 3), []
    for _ in range(N_WARM_UP + n_rounds):
        hvd.barrier()
        start = time.perf_counter()
        handles = []
        for number, (wire, context) in enumerate(map(compressor.compress, gradients)):
            handles.append((hvd.allreduce_async_(wire, name=str(number), op=hvd.Average), context))
        for handle, context in handles:
            compressor.decompress(hvd.synchronize(handle), context)
        seconds.append(time.perf_counter() - start)
    medians = hvd.allgather_object(statistics.median(seconds[N_WARM_UP:]))
    if hvd.rank() == 0:
        print(1e3 * max(medians), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="10gbit", help="of the link (10gbit)")
    parser.add_argument("--launches", type=int, default=4, help="of each start (4)")
    parser.add_argument("--rounds", type=int, default=30, help="of each launch (30)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        synchronise(args.rounds)
        return 0
    found: dict[str, list[float]] = {name: [] for name in STARTS}
    try:
        with Cluster(2, args.rate) as cluster:
            for _ in range(args.launches):
                for name, value in STARTS.items():
                    command = [sys.executable, __file__, "--rank", "--rounds", str(args.rounds)]
                    done = cluster.mpirun(command, timeout=120, extra_mca={"mpi_yield_when_idle": value})
                    found[name].append(float(done.stdout.split()[-1]))
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    for name, times in found.items():
        print(f"{name}: median {statistics.median(times):.1f} ms of {', '.join(f'{time:.1f}' for time in times)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
