"""Errors that frontends turn into those of their framework."""


class LostPeer(RuntimeError):
    """Another rank has gone, or Horovod has been shut down: what elastic jobs recover from."""
