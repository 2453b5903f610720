"""PyTorch's DistributedDataParallel: `model.register_comm_hook(APSState(e=4, m=3), aps_hook)`. No Horovod.

- `hook`: what DDP calls for every bucket of gradients
- `state`: options, names, and what the hook keeps from step to step
- `driver`: the thread that moves a step's gradients on while backward goes on
- `names`: what the model calls its parameters
"""

from horovod_aps.ddp.hook import aps_hook
from horovod_aps.ddp.state import APSState, PackedState

__all__ = ["APSState", "PackedState", "aps_hook"]
