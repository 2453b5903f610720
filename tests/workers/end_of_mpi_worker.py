"""Rank 0 shuts Horovod down, which ends MPI on all ranks, while rank 1 is in MPI: that must be over first."""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

from horovod_aps.errors import LostPeer
from horovod_aps.torch import APSCompressor
from horovod_aps.transports import mpi

hvd.init()
from mpi4py import MPI  # noqa: E402 (Horovod has started MPI, so it also ends it)


class SlowProbe:
    """A communicator in which one call takes so long that MPI could end meanwhile."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def Improbe(self, **arguments: object) -> None:  # noqa: N802 (MPI's name)
        time.sleep(1.0)
        print("ENDED IN A CALL" if MPI.Is_finalized() else "ALIVE AFTER A CALL", flush=True)

    def __getattr__(self, name: str) -> object:
        return getattr(self._comm, name)


compressor = APSCompressor(4, 3)
hvd.allreduce(torch.ones(8), name="x", compression=compressor)
if hvd.rank() == 0:
    time.sleep(0.5)
    hvd.shutdown()
else:
    (transport,) = mpi.farewells._open
    transport._comm = SlowProbe(transport._comm)
    try:
        while True:
            transport.heard()
    except LostPeer as error:
        print(f"RAISED {error}", flush=True)
