"""Errors that frontends turn into those of their framework."""


class LostPeer(RuntimeError):
    """Another rank has gone, or Horovod has been shut down: what elastic jobs recover from."""


def cannot_go_on(who: str, why: bytes) -> LostPeer:
    """A rank has failed in the middle of an exchange, and has said why."""
    return LostPeer(f"{who} could not go on: {why.decode(errors='replace')}")


def not_ours(rank: int, n_bytes: int) -> ValueError:
    """Another rank speaks another language."""
    return ValueError(
        f"APSCompressor: rank {rank} has sent {n_bytes} bytes that are not of horovod_aps; "
        f"check that all ranks run the same program and version"
    )


def named(error: ValueError, who: str) -> ValueError:
    """The same error, of whoever the user has made; the engine's own words are of an APSCompressor."""
    return ValueError(str(error).replace("APSCompressor:", f"{who}:", 1))
