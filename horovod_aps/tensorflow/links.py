"""What a rank knows of its links to the others, and what it says of them in the ticket before every exchange.

A link is the transport of one compressor in one process set. After an elastic reset a new worker has none, while the
others may not have noticed anything: neither size nor rank need to change. So all ranks make one if any of them has
none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.eager.context import eager_mode

from horovod_aps.frontends import world
from horovod_aps.tensorflow import devices, operations
from horovod_aps.tensorflow.collectives import allreduce
from horovod_aps.tensorflow.order import shared_variable, shared_variables
from horovod_aps.transports import sockets
from horovod_aps.transports.shared import SharedTransport

PRESENT, NEW, SPEAKS_MPI, PACKED, ON_GPU, COLLECTIVE, N_WORDS = range(7)  # the words of a ticket

_linked: set[int] = set()  # process sets to whose ranks this one has a link
_world_numbers: Counter[int] = Counter()  # by process set; links of an earlier world are not used any more


def ticket(process_set_id: int, packed: bool) -> tf.Tensor:
    """What a rank says before an exchange, to be summed over all ranks.

    Not a constant: TensorFlow runs Horovod's ops on constants once, while optimizing.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        return shared_variable(_ticket_name(process_set_id, packed), ticket_words(process_set_id, packed)).read_value()
    words = tf.numpy_function(lambda: ticket_words(process_set_id, packed), [], tf.int32, stateful=True)
    words.set_shape([N_WORDS])
    return words


def ticket_words(process_set_id: int, packed: bool) -> np.ndarray:
    """The ticket as it is now.

    Present, without a link to the others yet, able to speak MPI, transport="packed", able to pack on a GPU, and to have
    Horovod carry what is packed there.
    """
    is_new, speaks_mpi = process_set_id not in _linked, world.mpi_usable(mpi_ops._basics)
    on_gpu, by_nccl = packed and devices.can_pack(), packed and operations.may_carry()
    return np.array([1, is_new, speaks_mpi, packed, on_gpu, by_nccl], np.int32)


def all_speak_mpi(ticket: np.ndarray) -> bool:
    """Whether that is what the sum of all tickets says."""
    return bool(ticket[SPEAKS_MPI] == ticket[PRESENT])


def all_pack_on_gpus(ticket: np.ndarray) -> bool:
    """Whether all ranks can pack gradients on a GPU, as the sum of all tickets says; else all do so on the host."""
    return bool(ticket[ON_GPU] == ticket[PRESENT])


def all_want_operations(ticket: np.ndarray) -> bool:
    """Whether packed bytes on GPUs go by Horovod's own operations, as the sum of all tickets says."""
    return bool(ticket[COLLECTIVE] == ticket[PRESENT])


def _ticket_name(process_set_id: int, packed: bool) -> str:
    return f"ticket_{process_set_id}_{'packed' if packed else 'allreduce'}"


def _renew_tickets(process_set_id: int) -> None:
    """Say in all tickets to come, those of graphs made earlier too, what holds for this rank now."""
    for packed in (False, True):
        variable = shared_variables.get(_ticket_name(process_set_id, packed))
        if variable is not None:
            with eager_mode():
                variable.assign(ticket_words(process_set_id, packed))


@dataclass(frozen=True)
class Link:
    """The transport of a compressor in one process set, and the world it was made in."""

    shared: SharedTransport
    world_number: int
    ranks: tuple[int, ...]
    rank: int


class Links:
    """The links of one compressor, by process set."""

    def __init__(self, why_flat: str) -> None:
        """`why_flat` is why ranks should not look for others on their host, if so."""
        self._links: dict[int, Link] = {}
        self._why_flat = why_flat

    def close(self) -> None:
        """Nobody will use them again."""
        for link in list(self._links.values()):
            link.shared.transport.close()

    def get(self, process_set: Any, ticket: np.ndarray, stem: str, by_messages: bool = False) -> Link:
        """The link to the ranks of a process set, made anew by all of them if any has none.

        `stem` names the call site, by which a new link is known on all ranks: compressors need not be made in the same
        order. A rank without a link says so in its ticket, which may have been written before an earlier exchange of
        the same step made the link, so all ranks ask again. Jobs that speak MPI are never elastic: there all ranks have
        a link, or none. Over a link that is made with `by_messages`, for gradients on GPUs, the ranks of a host share
        no memory; what they reduce on the host over the same link goes by messages too, with the same result.
        """
        ps_id, ranks, rank = process_set.process_set_id, tuple(process_set.ranks), process_set.rank()
        speak_mpi = all_speak_mpi(ticket)
        link = before = self._links.get(ps_id)
        if link is not None and (link.ranks, link.rank, link.world_number) != (ranks, rank, _world_numbers[ps_id]):
            link = None
        if ticket[NEW] and not speak_mpi and not _smallest(int(link is not None), ps_id):
            _world_numbers[ps_id] += 1  # a new worker has no link of any compressor
            link = None
        if link is not None:
            return link
        if before is not None:
            before.shared.transport.close()
        addresses = np.zeros(0, np.int32)
        if not speak_mpi:
            addresses = allreduce(sockets.listener().words(rank, len(ranks)), mpi_ops.Sum, ps_id)
        n_able = len(ranks) if speak_mpi else 0
        name, place = f"{ps_id} {ranks} {stem}", ranks.index(mpi_ops.rank())
        transport = world.link(name, ranks, place, n_able, addresses, self._why_flat, by_messages)
        link = self._links[ps_id] = Link(SharedTransport(transport), _world_numbers[ps_id], ranks, rank)
        _linked.add(ps_id)
        _renew_tickets(ps_id)
        return link

    def drop(self, process_set_id: int) -> None:
        """Have all ranks make a new link: this one is broken, and the same ranks may go on, in an elastic job."""
        link = self._links.pop(process_set_id, None)
        if link is not None:
            link.shared.transport.close()
            _linked.discard(process_set_id)
            _renew_tickets(process_set_id)


def _smallest(value: int, process_set_id: int) -> int:
    """Of all ranks of the process set."""
    return int(allreduce(np.array([value], np.int32), mpi_ops.Min, process_set_id)[0])
