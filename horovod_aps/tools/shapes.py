"""Parameter shapes of well-known models, for benchmarks and predictions that need sizes but no framework.

Names and order are those of the reference implementations (torchvision's for the vision models, the
original checkpoints' for BERT and GPT-2), from the input to the output; backward produces gradients in the
opposite order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Shapes = list[tuple[str, tuple[int, ...]]]


def _norm(name: str, n_channels: int) -> Shapes:
    return [(f"{name}.weight", (n_channels,)), (f"{name}.bias", (n_channels,))]


def _linear(name: str, n_in: int, n_out: int) -> Shapes:
    return [(f"{name}.weight", (n_out, n_in)), (f"{name}.bias", (n_out,))]


def _resnet50_body() -> Shapes:
    """Everything of ResNet-50 before its last layer."""
    shapes: Shapes = [("conv1.weight", (64, 3, 7, 7)), *_norm("bn1", 64)]
    n_in = 64
    for stage, (n_blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for block in range(n_blocks):
            name = f"layer{stage}.{block}"
            shapes += [(f"{name}.conv1.weight", (width, n_in, 1, 1)), *_norm(f"{name}.bn1", width)]
            shapes += [(f"{name}.conv2.weight", (width, width, 3, 3)), *_norm(f"{name}.bn2", width)]
            shapes += [(f"{name}.conv3.weight", (4 * width, width, 1, 1)), *_norm(f"{name}.bn3", 4 * width)]
            if block == 0:
                shapes += [(f"{name}.downsample.0.weight", (4 * width, n_in, 1, 1))]
                shapes += _norm(f"{name}.downsample.1", 4 * width)
            n_in = 4 * width
    return shapes


def _resnet50() -> Shapes:
    return _resnet50_body() + _linear("fc", 2048, 1000)


def _fcn_resnet50() -> Shapes:
    """With the auxiliary head that training uses; 21 classes."""
    shapes: Shapes = [(f"backbone.{name}", shape) for name, shape in _resnet50_body()]
    for head, n_in in (("classifier", 2048), ("aux_classifier", 1024)):
        width = n_in // 4
        shapes += [(f"{head}.0.weight", (width, n_in, 3, 3)), *_norm(f"{head}.1", width)]
        shapes += [(f"{head}.4.weight", (21, width, 1, 1)), (f"{head}.4.bias", (21,))]
    return shapes


def _vgg16() -> Shapes:
    shapes: Shapes = []
    n_in, index = 3, 0
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width == 0:  # a pooling layer, which takes one place in the numbering
            index += 1
            continue
        shapes += [(f"features.{index}.weight", (width, n_in, 3, 3)), (f"features.{index}.bias", (width,))]
        n_in, index = width, index + 2
    for index, (n_in, n_out) in zip(
        (0, 3, 6), ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)), strict=True
    ):
        shapes += _linear(f"classifier.{index}", n_in, n_out)
    return shapes


def _mobilenet_v2() -> Shapes:
    shapes: Shapes = [("features.0.0.weight", (32, 3, 3, 3)), *_norm("features.0.1", 32)]
    n_in, index = 32, 1
    plan = [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)]
    for expansion, n_out, n_blocks in plan:
        for _ in range(n_blocks):
            name, hidden, part = f"features.{index}.conv", n_in * expansion, 0
            if expansion != 1:
                shapes += [(f"{name}.0.0.weight", (hidden, n_in, 1, 1)), *_norm(f"{name}.0.1", hidden)]
                part = 1
            shapes += [(f"{name}.{part}.0.weight", (hidden, 1, 3, 3)), *_norm(f"{name}.{part}.1", hidden)]
            shapes += [
                (f"{name}.{part + 1}.weight", (n_out, hidden, 1, 1)),
                *_norm(f"{name}.{part + 2}", n_out),
            ]
            n_in, index = n_out, index + 1
    shapes += [("features.18.0.weight", (1280, 320, 1, 1)), *_norm("features.18.1", 1280)]
    return shapes + _linear("classifier.1", 1280, 1000)


def _bert_base() -> Shapes:
    """The encoder with its pooler, without a task's head."""
    d = 768
    shapes: Shapes = [
        ("embeddings.word_embeddings.weight", (30522, d)),
        ("embeddings.position_embeddings.weight", (512, d)),
        ("embeddings.token_type_embeddings.weight", (2, d)),
        *_norm("embeddings.LayerNorm", d),
    ]
    for layer in range(12):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            shapes += _linear(f"{name}.attention.self.{part}", d, d)
        shapes += _linear(f"{name}.attention.output.dense", d, d) + _norm(
            f"{name}.attention.output.LayerNorm", d
        )
        shapes += _linear(f"{name}.intermediate.dense", d, 4 * d)
        shapes += _linear(f"{name}.output.dense", 4 * d, d) + _norm(f"{name}.output.LayerNorm", d)
    return shapes + _linear("pooler.dense", d, d)


def _gpt2() -> Shapes:
    """GPT-2 small; the output layer shares the embedding's weight. Its matrices are stored input-first."""
    d = 768
    shapes: Shapes = [("wte.weight", (50257, d)), ("wpe.weight", (1024, d))]
    for layer in range(12):
        name = f"h.{layer}"
        shapes += _norm(f"{name}.ln_1", d)
        shapes += [(f"{name}.attn.c_attn.weight", (d, 3 * d)), (f"{name}.attn.c_attn.bias", (3 * d,))]
        shapes += [(f"{name}.attn.c_proj.weight", (d, d)), (f"{name}.attn.c_proj.bias", (d,))]
        shapes += _norm(f"{name}.ln_2", d)
        shapes += [(f"{name}.mlp.c_fc.weight", (d, 4 * d)), (f"{name}.mlp.c_fc.bias", (4 * d,))]
        shapes += [(f"{name}.mlp.c_proj.weight", (4 * d, d)), (f"{name}.mlp.c_proj.bias", (d,))]
    return shapes + _norm("ln_f", d)


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "mobilenet_v2": _mobilenet_v2,
    "bert_base": _bert_base,
    "gpt2": _gpt2,
    "fcn_resnet50": _fcn_resnet50,
}


def layer_shapes(name: str) -> Shapes:
    """Names and shapes of a model's parameters, from input to output; `MODELS` lists the names."""
    if name not in MODELS:
        raise ValueError(f"layer_shapes: name must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]()


def layer_sizes(name: str) -> list[int]:
    """Numbers of elements of a model's parameters, in the order of `layer_shapes`."""
    return [math.prod(shape) for _, shape in layer_shapes(name)]
