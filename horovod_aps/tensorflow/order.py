"""One order for all exchanges of a graph, the same on all ranks.

MPI matches messages by order, and an exchange blocks a thread of TensorFlow's pool: if two ranks ran the exchanges of a
step in different orders, both would wait for ever. Inside `tf.function` every exchange therefore writes to one
variable, before and after, and TensorFlow keeps such writes in the order of the program. A `tf.compat.v1` graph has
no such rule: there every exchange depends on the one that was added before it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

shared_variables: dict[str, tf.Variable] = {}
LAST = "_horovod_aps_last"  # attribute of a v1 graph: the exchange that was added last, and the branch it is in


class Sequence:
    """Where one exchange stands: what it waits for, and how the next one will find it."""

    def __init__(self, before: list[Any]) -> None:
        self.before = before
        self.op: Any = None

    def after(self, op: Any) -> None:
        """Name the op that ends the exchange."""
        self.op = op


@contextmanager
def in_sequence() -> Generator[Sequence, None, None]:
    """Add an exchange to the current graph, after all that were added before it."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        turn = shared_variable("turn", np.int64(0))
        sequence = Sequence([turn.assign_add(1, read_value=False)])
        yield sequence
        with tf.control_dependencies([sequence.op]):
            turn.assign_add(1, read_value=False)
        return
    graphs = _with_outer_graphs(tf.compat.v1.get_default_graph())
    sequence = Sequence(_predecessor(graphs))
    yield sequence
    setattr(graphs[-1], LAST, (weakref.ref(graphs[0]), sequence.op))


def shared_variable(name: str, value: Any) -> tf.Variable:
    """A variable that all graphs share, made when it is first needed."""
    if name not in shared_variables:
        with tf.init_scope(), tf.device("/CPU:0"):
            shared_variables[name] = tf.Variable(value, trainable=False, name=f"horovod_aps_{name}")
    return shared_variables[name]


def _with_outer_graphs(graph: Any) -> list[Any]:
    """A branch, the graph around it, and so on to the one around all."""
    graphs = [graph]
    while getattr(graphs[-1], "outer_graph", None) is not None:
        graphs.append(graphs[-1].outer_graph)
    return graphs


def _predecessor(graphs: list[Any]) -> list[Any]:
    """Something in the current graph that is ready once the previous exchange is over; `graphs` begins with it.

    Horovod puts every all-reduce into a branch of its own `tf.cond`, and all of them into the branch of another one if
    `backward_passes_per_step` is more than one. From outside, such a branch is over when the cond is, so that is what
    the next exchange waits for, in the innermost graph that is around both.
    """
    found = getattr(graphs[-1], LAST, None)
    if found is None or found[0]() is None:
        return []
    last_graph, op = found[0](), found[1]
    inner = list(itertools.takewhile(lambda one: one not in graphs, _with_outer_graphs(last_graph)))
    if inner:
        op = _caller(inner[-1])
    elif last_graph is graphs[0] and len(graphs) > 1:
        return [op]
    else:
        op = _after_merge(op)
    if op is None:
        return []
    # Reading a tensor from outside is what makes the cond around the current branch wait for it.
    return [tf.identity(op.outputs[0])] if op.outputs else [op]


def _caller(branch: Any) -> Any:
    """The cond that runs a branch, in the graph around it; None while the cond is still being built."""
    for op in reversed(branch.outer_graph.get_operations()):
        if op.type in ("If", "StatelessIf") and branch.name in (
            op.get_attr("then_branch").name,
            op.get_attr("else_branch").name,
        ):
            return op
    return None


def _after_merge(op: Any) -> Any:
    """The Merge that ends a v1 cond around `op`; `op` itself if it is in none.

    An op in a branch that is not taken would take everything that depends on it with it.
    """
    if op._get_control_flow_context() is None:
        return op
    seen, waiting = set(), [op]
    while waiting:
        current = waiting.pop()
        for output in current.outputs:
            for consumer in output.consumers():
                if consumer.type == "Merge":
                    return consumer
                if consumer not in seen:
                    seen.add(consumer)
                    waiting.append(consumer)
    return None
