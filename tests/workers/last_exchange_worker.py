"""One rank of tests/test_faults.py: rank 0 is slow in its last exchange, when all others have left already."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import torch

from horovod_aps.torch import APSCompressor
from horovod_aps.transports import mpi


def main() -> None:
    hvd.init()
    compressor, gradient = APSCompressor(e=4, m=3), torch.ones(100_000)
    for _ in range(2):
        hvd.allreduce(gradient, name="g", compression=compressor)
    if hvd.rank() == 0:
        done = mpi._MpiRequest.done

        def slowly(self: Any) -> bool:
            time.sleep(1.0)
            return done(self)

        mpi._MpiRequest.done = slowly  # type: ignore[method-assign]
    result = hvd.allreduce(gradient, name="g", compression=compressor)
    assert torch.equal(result, gradient)
    if hvd.rank() == 0:
        print("SAVED", flush=True)  # as a rank that writes the checkpoint at the end


if __name__ == "__main__":
    main()
