"""What the model calls the parameters of a bucket.

DDP hands out parameters without names, and in other buckets after the first step. It keeps the state that a hook was
registered with, and so can be found by it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_aps.log import logger

COMPILED = "_orig_mod."  # what torch.compile puts in front of a module's names


def models_with(state: object) -> list[DistributedDataParallel]:
    """The models whose communication hook has this state."""
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    models = [one for one in gc.get_objects() if type(one) in kinds]  # looks at everything, once in a run
    return [model for model in models if any(kept is state for _, kept in getattr(model, "_comm_hooks", []))]


class Names:
    """Parameters by name, and their order in the model."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], given: bool = False) -> None:
        self.given = given
        """Whether they are the user's own, and not found in a model."""
        self._names: Any = WeakTensorKeyDictionary()
        self._places: dict[str, int] = {}
        for name, parameter in named_parameters:
            self._add(parameter, name.replace(COMPILED, ""))

    @classmethod
    def of_model(cls, model: DistributedDataParallel) -> Names:
        return cls(model.module.named_parameters())

    def _add(self, parameter: Tensor, name: str) -> None:
        if name in self._places and self._names.get(parameter) != name:
            raise ValueError(f"APSState: two parameters are called {name!r}")
        self._names[parameter] = name
        self._places.setdefault(name, len(self._places))

    def know(self, parameters: Sequence[Tensor]) -> bool:
        return all(parameter in self._names for parameter in parameters)

    def of(self, parameters: Sequence[Tensor]) -> list[str]:
        """Their names; an unknown one is called by its number."""
        for parameter in parameters:
            if parameter not in self._names:
                name = f"parameter.{len(self._places)}"
                logger.info("a parameter of shape %s has no name; it is called %s", tuple(parameter.shape), name)
                self._add(parameter, name)
        return [self._names[parameter] for parameter in parameters]

    def are_as_in_model(self, names: Sequence[str]) -> bool:
        """Whether they come in the order of the model's parameters."""
        places = [self._places[name] for name in names]
        return places == sorted(places)
