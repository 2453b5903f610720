"""horovod_aps.tools.shapes against the published sizes of the models and against torch's own layers."""

import math

import pytest
import torch
import torchvision

from horovod_aps.tools.shapes import MODELS, layer_shapes, layer_sizes

# Parameters as published (torchvision's model table, the BERT and GPT-2 checkpoints), and numbers of tensors.
PUBLISHED = {
    "alexnet": (61_100_840, 16),
    "vgg16": (138_357_544, 32),
    "vgg19": (143_667_240, 38),
    "resnet18": (11_689_512, 62),
    "resnet34": (21_797_672, 110),
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "resnet152": (60_192_808, 467),
    "inception_v3": (27_161_264, 292),
    "mobilenet_v2": (3_504_872, 158),
    "vit_b_16": (86_567_656, 152),
    "bert_base": (109_482_240, 199),
    "bert_large": (335_141_888, 391),
    "gpt2": (124_439_808, 148),
    "lstm": (19_780_400, 11),
    "fcn_resnet50": (35_322_218, 169),
}
NOT_TORCHVISIONS = {"bert_base", "bert_large", "gpt2", "lstm"}


def test_published_covers_all_models() -> None:
    assert set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layer_shapes_have_the_published_size(name: str) -> None:
    shapes = layer_shapes(name)
    assert (sum(layer_sizes(name)), len(shapes)) == PUBLISHED[name]
    assert layer_sizes(name) == [math.prod(shape) for _, shape in shapes]
    assert len({layer for layer, _ in shapes}) == len(shapes)
    assert all(n > 0 for n in layer_sizes(name))


@pytest.mark.parametrize("name", sorted(set(MODELS) - NOT_TORCHVISIONS))
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    options = {"inception_v3": {"init_weights": False}, "fcn_resnet50": {"aux_loss": True, "weights_backbone": None}}
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **options.get(name, {}))
    assert layer_shapes(name) == [(label, tuple(value.shape)) for label, value in model.named_parameters()]


def test_bert_layer_matches_torch_encoder_layer() -> None:
    theirs = torch.nn.TransformerEncoderLayer(768, 12, dim_feedforward=3072)
    ours = sum(math.prod(shape) for name, shape in layer_shapes("bert_base") if name.startswith("encoder.layer.7."))
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())


def test_layer_shapes_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="^layer_shapes: name must be one of alexnet, .* got 'lenet'$"):
        layer_shapes("lenet")
