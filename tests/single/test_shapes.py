"""horovod_aps.tools.shapes against the published sizes of the models and against torch's own layers."""

import math

import pytest
import torch

from horovod_aps.tools.shapes import MODELS, layer_shapes, layer_sizes

# Parameters as published (torchvision's model table, the BERT and GPT-2 checkpoints), and numbers of tensors.
PUBLISHED = {
    "resnet50": (25_557_032, 161),
    "vgg16": (138_357_544, 32),
    "mobilenet_v2": (3_504_872, 158),
    "bert_base": (109_482_240, 199),
    "gpt2": (124_439_808, 148),
    "fcn_resnet50": (35_322_218, 169),
}


def test_published_covers_all_models() -> None:
    assert set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layer_shapes_have_the_published_size(name: str) -> None:
    shapes = layer_shapes(name)
    assert (sum(layer_sizes(name)), len(shapes)) == PUBLISHED[name]
    assert layer_sizes(name) == [math.prod(shape) for _, shape in shapes]
    assert len({layer for layer, _ in shapes}) == len(shapes)
    assert all(n > 0 for n in layer_sizes(name))


def test_bert_layer_matches_torch_encoder_layer() -> None:
    theirs = torch.nn.TransformerEncoderLayer(768, 12, dim_feedforward=3072)
    ours = sum(
        math.prod(shape) for name, shape in layer_shapes("bert_base") if name.startswith("encoder.layer.7.")
    )
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())


def test_vgg16_matches_torch_layers() -> None:
    layers = dict(layer_shapes("vgg16"))
    for name, shape in layers.items():
        if name.startswith("features") and name.endswith("weight"):
            theirs = torch.nn.Conv2d(shape[1], shape[0], 3)
            assert shape == tuple(theirs.weight.shape)
            assert theirs.bias is not None
            assert layers[name.replace("weight", "bias")] == tuple(theirs.bias.shape)


def test_layer_shapes_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="^layer_shapes: name must be one of resnet50, .* got 'alexnet'$"):
        layer_shapes("alexnet")
