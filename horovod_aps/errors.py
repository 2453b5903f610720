"""Errors that frontends turn into those of their framework."""

from __future__ import annotations

from collections.abc import Callable


class LostPeer(RuntimeError):
    """Another rank has gone, or Horovod has been shut down: what elastic jobs recover from."""


class OutOfSharedMemory(MemoryError):
    """The ranks of this host cannot share as much memory as they need."""

    def __init__(self, n_bytes: int, n_ranks: int, why: str) -> None:
        super().__init__(
            f"the memory that the {n_ranks} ranks of its host share cannot grow to {n_bytes:,} bytes ({why}); choose a "
            f'smaller bucket_mb or hierarchy="flat", or raise the limit of memory of the host, container or job'
        )


class NoSharedMemory(LostPeer):
    """A rank, perhaps this one, is out of shared memory: trying again in the same way would not help."""


def failure_of(error: BaseException) -> str:
    """What a rank that cannot go on tells the others."""
    return f"{type(error).__name__}: {error}"


def cannot_go_on(who: str, why: bytes) -> LostPeer:
    """A rank has failed in the middle of an exchange, and has said why (`failure_of`)."""
    kind = NoSharedMemory if why.startswith(OutOfSharedMemory.__name__.encode()) else LostPeer
    return kind(f"{who} could not go on: {why.decode(errors='replace')}")


def for_users(error: LostPeer, who: str, lost: Callable[[str], Exception]) -> Exception:
    """What a frontend raises: `lost`, from which elastic jobs recover, if there is any hope of that."""
    text = str(error)
    return MemoryError(f"{who}: {text}") if isinstance(error, NoSharedMemory) else lost(text)


def not_ours(rank: int, n_bytes: int) -> ValueError:
    """Another rank speaks another language."""
    return ValueError(
        f"APSCompressor: rank {rank} has sent {n_bytes} bytes that are not of horovod_aps; "
        f"check that all ranks run the same program and version"
    )


def named(error: ValueError, who: str) -> ValueError:
    """The same error, of whoever the user has made; the engine's own words are of an APSCompressor."""
    return ValueError(str(error).replace("APSCompressor:", f"{who}:", 1))
