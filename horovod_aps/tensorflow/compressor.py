"""The compressors for TensorFlow: Horovod's Compressor interface, and the guard against the stock Keras 3 wrapper.

What happens to a compressed tensor is in `seam` (how Horovod reaches us) and `engine` (what runs in a step).
"""

from __future__ import annotations

import atexit
import gc
import itertools
import sys
import threading
import warnings
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compressor

from horovod_aps import cleanup, config
from horovod_aps.frontends.checks import NO_INSTANCE, OTHER_COMPRESSION, refuse_alone
from horovod_aps.frontends.compressor import BaseCompressor, ByBits
from horovod_aps.log import logger
from horovod_aps.tensorflow import seam
from horovod_aps.tensorflow.links import Links

MANY = 64  # compressors in one process, at which it looks as if one were made in every step
_ids = itertools.count(1)


class PackedCompressor(BaseCompressor, Compressor):
    __doc__ = BaseCompressor.__doc__
    _key: int  # set by seam.register

    def _start(self) -> None:
        super()._start()
        self._n_single = 0  # tensors traced outside of groups
        self._lock = threading.Lock()
        self._links = Links(self._options.why_flat)
        cleanup.after(self, self._links.close)
        self._used = False
        if mpi_ops.is_initialized() and mpi_ops.size() == 1:  # some of Horovod's wrappers would never call it
            refuse_alone(self._options)
        seam.register(self)
        if next(_ids) % MANY == 0:
            warnings.warn(
                f"APSCompressor: {MANY} more were made in this process; make one before the training loop, "
                f"since Horovod traces its all-reduce anew for every one and keeps it",
                stacklevel=3,
            )

    def __hash__(self) -> int:
        # Horovod looks its all-reduce functions up by their arguments, so this is the first thing that the stock
        # Keras wrapper does with a compressor, and on Keras 3 also the last.
        _refuse_stock_keras3()
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any = None) -> tuple[seam.WireTensor, None]:
        """Mark a tensor for the exchange; only floating-point ones are compressed, the rest take Horovod's way."""
        if tensor is None:  # it is `self`: the class was passed, as one passes hvd.Compression.fp16
            raise TypeError(NO_INSTANCE)
        return seam.WireTensor(tf.convert_to_tensor(tensor), self._key), None

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: None) -> tf.Tensor:
        """The reduced tensor, which the exchange has left in its own dtype."""
        return tensor


class APSCompressor(ByBits, PackedCompressor):
    __doc__ = BaseCompressor.__doc__


@atexit.register
def _warn_of_idle_compressors() -> None:
    """Some of Horovod's own wrappers take a compressor and never reduce anything: that must not go unnoticed.

    A program that an exception or an early `sys.exit` has ended may not have come that far, and what it said last
    should stay last.
    """
    failure = getattr(sys, "last_value", None)
    if failure is not None and "Mismatched data types" in str(failure) and "int32" in str(failure):
        logger.error(OTHER_COMPRESSION)  # the ticket met another rank's gradient under the same name
    if failure is not None or (_has_exited() and not _has_trained()):
        return
    if config.launcher_rank() == "0" and config.launcher_size() != "1":
        for compressor in seam.compressors():
            if not compressor._used:
                logger.warning(
                    "%r was never used: no gradient went through it, and replicas may differ. Horovod's "
                    "load_model on Keras 3 (use horovod_aps.keras.load_model) and its Adasum optimizer for "
                    "tf.compat.v1 ignore compressors",
                    compressor,
                )


def _has_exited() -> bool:
    """Whether `sys.exit` has ended the program: Python takes `__file__` away from a script that comes to its end."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and hasattr(main, "__file__")


def _has_trained() -> bool:
    """Whether an optimizer of Keras has made a step."""
    keras = sys.modules.get("keras")
    if keras is None:
        return False
    optimizers = [one for one in gc.get_objects() if isinstance(one, keras.optimizers.Optimizer)]
    return any(int(one.iterations) > 0 for one in optimizers if getattr(one, "built", True))


def _refuse_stock_keras3() -> None:
    """Raise if Horovod's own Keras wrapper is being built around a Keras 3 optimizer.

    Keras 3 calls `apply`, which that wrapper does not override: it would train without any all-reduce.
    """
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_globals.get("__name__") == "horovod._keras":
            optimizer = frame.f_locals.get("self")
            keras = sys.modules.get("keras")
            if keras is not None and keras.__version__ >= "3" and isinstance(optimizer, keras.optimizers.Optimizer):
                raise ValueError(
                    "APSCompressor: Horovod's DistributedOptimizer never all-reduces on Keras 3; use "
                    "horovod_aps.keras.DistributedOptimizer with the same arguments, or tf-keras with "
                    "TF_USE_LEGACY_KERAS=1"
                )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
