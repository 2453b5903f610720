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


def _conv_norm(name: str, n_in: int, n_out: int, *kernel: int) -> Shapes:
    """A convolution without bias and the normalisation behind it, as torchvision's Inception names them."""
    return [(f"{name}.conv.weight", (n_out, n_in, *kernel)), *_norm(f"{name}.bn", n_out)]


def _alexnet() -> Shapes:
    shapes: Shapes = []
    plan = [(0, 3, 64, 11), (3, 64, 192, 5), (6, 192, 384, 3), (8, 384, 256, 3), (10, 256, 256, 3)]
    for index, n_in, n_out, width in plan:
        shapes += [(f"features.{index}.weight", (n_out, n_in, width, width)), (f"features.{index}.bias", (n_out,))]
    for index, n_in, n_out in ((1, 256 * 6 * 6, 4096), (4, 4096, 4096), (6, 4096, 1000)):
        shapes += _linear(f"classifier.{index}", n_in, n_out)
    return shapes


def _resnet_body(n_blocks: tuple[int, ...], kernels: tuple[int, ...]) -> Shapes:
    """Everything of a ResNet before its last layer; `kernels` are the widths of a block's convolutions."""
    shapes: Shapes = [("conv1.weight", (64, 3, 7, 7)), *_norm("bn1", 64)]
    n_in, expansion = 64, 4 if len(kernels) == 3 else 1
    for stage, (n, width) in enumerate(zip(n_blocks, (64, 128, 256, 512)), start=1):
        for block in range(n):
            name, n_out = f"layer{stage}.{block}", expansion * width
            channels = [n_in] + [width] * (len(kernels) - 1) + [n_out]
            for k, kernel in enumerate(kernels):
                shapes += [(f"{name}.conv{k + 1}.weight", (channels[k + 1], channels[k], kernel, kernel))]
                shapes += _norm(f"{name}.bn{k + 1}", channels[k + 1])
            if block == 0 and n_in != n_out:
                shapes += [(f"{name}.downsample.0.weight", (n_out, n_in, 1, 1)), *_norm(f"{name}.downsample.1", n_out)]
            n_in = n_out
    return shapes


BASIC, BOTTLENECK = (3, 3), (1, 3, 1)


def _resnet18() -> Shapes:
    return _resnet_body((2, 2, 2, 2), BASIC) + _linear("fc", 512, 1000)


def _resnet34() -> Shapes:
    return _resnet_body((3, 4, 6, 3), BASIC) + _linear("fc", 512, 1000)


def _resnet50() -> Shapes:
    return _resnet_body((3, 4, 6, 3), BOTTLENECK) + _linear("fc", 2048, 1000)


def _resnet101() -> Shapes:
    return _resnet_body((3, 4, 23, 3), BOTTLENECK) + _linear("fc", 2048, 1000)


def _resnet152() -> Shapes:
    return _resnet_body((3, 8, 36, 3), BOTTLENECK) + _linear("fc", 2048, 1000)


def _inception_v3() -> Shapes:
    """With the auxiliary head that training uses."""
    shapes: Shapes = []

    def block(name: str, *convolutions: tuple[str, int, int, int, int]) -> None:
        for part, n_in, n_out, height, width in convolutions:
            shapes.extend(_conv_norm(f"{name}.{part}", n_in, n_out, height, width))

    for name, n_in, n_out, kernel in (
        ("1a_3x3", 3, 32, 3),
        ("2a_3x3", 32, 32, 3),
        ("2b_3x3", 32, 64, 3),
        ("3b_1x1", 64, 80, 1),
        ("4a_3x3", 80, 192, 3),
    ):
        shapes += _conv_norm(f"Conv2d_{name}", n_in, n_out, kernel, kernel)
    double = (("branch3x3dbl_2", 64, 96, 3, 3), ("branch3x3dbl_3", 96, 96, 3, 3))
    for name, n_in, n_pool in (("5b", 192, 32), ("5c", 256, 64), ("5d", 288, 64)):
        block(
            f"Mixed_{name}",
            ("branch1x1", n_in, 64, 1, 1),
            ("branch5x5_1", n_in, 48, 1, 1),
            ("branch5x5_2", 48, 64, 5, 5),
            ("branch3x3dbl_1", n_in, 64, 1, 1),
            *double,
            ("branch_pool", n_in, n_pool, 1, 1),
        )
    block("Mixed_6a", ("branch3x3", 288, 384, 3, 3), ("branch3x3dbl_1", 288, 64, 1, 1), *double)
    for name, n in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        block(
            f"Mixed_{name}",
            ("branch1x1", 768, 192, 1, 1),
            ("branch7x7_1", 768, n, 1, 1),
            ("branch7x7_2", n, n, 1, 7),
            ("branch7x7_3", n, 192, 7, 1),
            ("branch7x7dbl_1", 768, n, 1, 1),
            ("branch7x7dbl_2", n, n, 7, 1),
            ("branch7x7dbl_3", n, n, 1, 7),
            ("branch7x7dbl_4", n, n, 7, 1),
            ("branch7x7dbl_5", n, 192, 1, 7),
            ("branch_pool", 768, 192, 1, 1),
        )
    block("AuxLogits", ("conv0", 768, 128, 1, 1), ("conv1", 128, 768, 5, 5))
    shapes += _linear("AuxLogits.fc", 768, 1000)
    block(
        "Mixed_7a",
        ("branch3x3_1", 768, 192, 1, 1),
        ("branch3x3_2", 192, 320, 3, 3),
        ("branch7x7x3_1", 768, 192, 1, 1),
        ("branch7x7x3_2", 192, 192, 1, 7),
        ("branch7x7x3_3", 192, 192, 7, 1),
        ("branch7x7x3_4", 192, 192, 3, 3),
    )
    for name, n_in in (("7b", 1280), ("7c", 2048)):
        block(
            f"Mixed_{name}",
            ("branch1x1", n_in, 320, 1, 1),
            ("branch3x3_1", n_in, 384, 1, 1),
            ("branch3x3_2a", 384, 384, 1, 3),
            ("branch3x3_2b", 384, 384, 3, 1),
            ("branch3x3dbl_1", n_in, 448, 1, 1),
            ("branch3x3dbl_2", 448, 384, 3, 3),
            ("branch3x3dbl_3a", 384, 384, 1, 3),
            ("branch3x3dbl_3b", 384, 384, 3, 1),
            ("branch_pool", n_in, 192, 1, 1),
        )
    return shapes + _linear("fc", 2048, 1000)


def _fcn_resnet50() -> Shapes:
    """With the auxiliary head that training uses; 21 classes."""
    shapes: Shapes = [(f"backbone.{name}", shape) for name, shape in _resnet_body((3, 4, 6, 3), BOTTLENECK)]
    for head, n_in in (("classifier", 2048), ("aux_classifier", 1024)):
        width = n_in // 4
        shapes += [(f"{head}.0.weight", (width, n_in, 3, 3)), *_norm(f"{head}.1", width)]
        shapes += [(f"{head}.4.weight", (21, width, 1, 1)), (f"{head}.4.bias", (21,))]
    return shapes


def _vgg(n_convolutions: tuple[int, ...]) -> Shapes:
    shapes: Shapes = []
    n_in, index = 3, 0
    for width, n in zip((64, 128, 256, 512, 512), n_convolutions):
        for _ in range(n):
            shapes += [(f"features.{index}.weight", (width, n_in, 3, 3)), (f"features.{index}.bias", (width,))]
            n_in, index = width, index + 2
        index += 1  # a pooling layer, which takes one place in the numbering
    for index, n_in, n_out in ((0, 512 * 7 * 7, 4096), (3, 4096, 4096), (6, 4096, 1000)):
        shapes += _linear(f"classifier.{index}", n_in, n_out)
    return shapes


def _vgg16() -> Shapes:
    return _vgg((2, 2, 3, 3, 3))


def _vgg19() -> Shapes:
    return _vgg((2, 2, 4, 4, 4))


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


def _bert(d: int, n_layers: int) -> Shapes:
    """The encoder with its pooler, without a task's head."""
    shapes: Shapes = [
        ("embeddings.word_embeddings.weight", (30522, d)),
        ("embeddings.position_embeddings.weight", (512, d)),
        ("embeddings.token_type_embeddings.weight", (2, d)),
        *_norm("embeddings.LayerNorm", d),
    ]
    for layer in range(n_layers):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            shapes += _linear(f"{name}.attention.self.{part}", d, d)
        shapes += _linear(f"{name}.attention.output.dense", d, d) + _norm(f"{name}.attention.output.LayerNorm", d)
        shapes += _linear(f"{name}.intermediate.dense", d, 4 * d)
        shapes += _linear(f"{name}.output.dense", 4 * d, d) + _norm(f"{name}.output.LayerNorm", d)
    return shapes + _linear("pooler.dense", d, d)


def _bert_base() -> Shapes:
    return _bert(768, 12)


def _bert_large() -> Shapes:
    return _bert(1024, 24)


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


def _vit_b_16() -> Shapes:
    d = 768
    shapes: Shapes = [("class_token", (1, 1, d)), ("conv_proj.weight", (d, 3, 16, 16)), ("conv_proj.bias", (d,))]
    shapes += [("encoder.pos_embedding", (1, 197, d))]
    for layer in range(12):
        name = f"encoder.layers.encoder_layer_{layer}"
        shapes += _norm(f"{name}.ln_1", d)
        for part, shape in (("weight", (3 * d, d)), ("bias", (3 * d,))):
            shapes += [(f"{name}.self_attention.in_proj_{part}", shape)]
        shapes += _linear(f"{name}.self_attention.out_proj", d, d) + _norm(f"{name}.ln_2", d)
        shapes += _linear(f"{name}.mlp.0", d, 4 * d) + _linear(f"{name}.mlp.3", 4 * d, d)
    return shapes + _norm("encoder.ln", d) + _linear("heads.head", d, 1000)


def _lstm() -> Shapes:
    """The medium word model of Zaremba et al. (2014): two layers of 650, 10,000 words; named as PyTorch's example."""
    width, n_words = 650, 10_000
    shapes: Shapes = [("encoder.weight", (n_words, width))]
    for layer in range(2):
        for part in ("ih", "hh"):
            shapes += [(f"rnn.weight_{part}_l{layer}", (4 * width, width))]
        for part in ("ih", "hh"):
            shapes += [(f"rnn.bias_{part}_l{layer}", (4 * width,))]
    return shapes + _linear("decoder", width, n_words)


MODELS: dict[str, Callable[[], Shapes]] = {
    "alexnet": _alexnet,
    "vgg16": _vgg16,
    "vgg19": _vgg19,
    "resnet18": _resnet18,
    "resnet34": _resnet34,
    "resnet50": _resnet50,
    "resnet101": _resnet101,
    "resnet152": _resnet152,
    "inception_v3": _inception_v3,
    "mobilenet_v2": _mobilenet_v2,
    "vit_b_16": _vit_b_16,
    "bert_base": _bert_base,
    "bert_large": _bert_large,
    "gpt2": _gpt2,
    "lstm": _lstm,
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
