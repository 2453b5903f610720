"""The networks of the activations study, in plain torch: ResNet-18 and -50, VGG-16, an AlexNet, a segmentation net."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from accuracy_tasks import SegNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _conv_norm(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(n_out),
    )


class _Residual(nn.Module):
    """Basic (two 3x3) or bottleneck (1x1, 3x3, 1x1) block; the stride is in the first 3x3."""

    def __init__(self, n_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        n_out = 4 * width if bottleneck else width
        if bottleneck:
            parts = [_conv_norm(n_in, width, 1), _conv_norm(width, width, 3, stride), _conv_norm(width, n_out, 1)]
        else:
            parts = [_conv_norm(n_in, width, 3, stride), _conv_norm(width, n_out, 3)]
        steps: list[nn.Module] = []
        for part in parts:
            steps += [part, nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*steps[:-1])
        self.shortcut = _conv_norm(n_in, n_out, 1, stride) if stride != 1 or n_in != n_out else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """He et al. 2016, with torchvision's placing of the stride; `small` is the stem for 32x32 photographs."""

    def __init__(self, n_blocks: Sequence[int], bottleneck: bool, n_classes: int = 1000, small: bool = False) -> None:
        super().__init__()
        stem: list[nn.Module] = [_conv_norm(3, 64, 3 if small else 7, 1 if small else 2), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*stem, *([] if small else [nn.MaxPool2d(3, 2, 1)]))
        blocks, n_in = [], 64
        for stage, count in enumerate(n_blocks):
            width = 64 << stage
            for i in range(count):
                blocks.append(_Residual(n_in, width, 2 if stage and not i else 1, bottleneck))
                n_in = 4 * width if bottleneck else width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(n_in, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Plain(nn.Module):
    """Convolutions with ReLU and max-pooling, then linear layers with dropout: VGG and AlexNet."""

    def __init__(self, stages: Sequence[nn.Module], head: Sequence[int], n_classes: int) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        layers: list[nn.Module] = []
        for n_in, n_out in zip(head, head[1:], strict=False):
            layers += [nn.Linear(n_in, n_out), nn.ReLU(inplace=True), nn.Dropout()]
        self.head = nn.Sequential(*layers, nn.Linear(head[-1], n_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).flatten(1))


def vgg16(size: int, n_classes: int) -> nn.Module:
    """Simonyan and Zisserman 2015, with a head of width 512, as is usual for small photographs."""
    stages, n_in = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        stage = nn.Sequential()
        for _ in range(count):
            stage += nn.Sequential(nn.Conv2d(n_in, width, 3, padding=1), nn.ReLU(inplace=True))
            n_in = width
        stages.append(stage.append(nn.MaxPool2d(2)))
    return Plain(stages, (512 * (size // 32) ** 2, 512, 512), n_classes)


def alexnet(size: int, n_classes: int) -> nn.Module:
    """Krizhevsky et al. 2012 in small: five convolutions, three poolings, three linear layers."""
    stages, n_in = [], 3
    for width, kernel, pool in ((64, 5, True), (192, 5, True), (384, 3, False), (256, 3, False), (256, 3, True)):
        stage = nn.Sequential(nn.Conv2d(n_in, width, kernel, padding=kernel // 2), nn.ReLU(inplace=True))
        stages.append(stage.append(nn.MaxPool2d(2)) if pool else stage)
        n_in = width
    return Plain(stages, (256 * (size // 8) ** 2, 512, 512), n_classes)


def build(name: str, size: int, n_classes: int) -> nn.Module:
    """The network for pictures of size x size; below 64 pixels ResNets have the stem for small photographs."""
    if name == "resnet18":
        return ResNet((2, 2, 2, 2), False, n_classes, size < 64)
    if name == "resnet50":
        return ResNet((3, 4, 6, 3), True, n_classes, size < 64)
    if name == "vgg16":
        return vgg16(size, n_classes)
    if name == "alexnet":
        return alexnet(size, n_classes)
    if name == "segnet":
        return SegNet(3, n_classes)
    raise ValueError(f"build: unknown network {name!r}")


NAMES = ("resnet18", "resnet50", "vgg16", "alexnet", "segnet")


def checkpoint_parts(model: nn.Module) -> nn.Module:
    """Let `torch.utils.checkpoint` compute every block or stage again in backward; returns the model."""
    for part in model.modules():
        if isinstance(part, ResNet):
            parts = [part.stem, *part.blocks]
        elif isinstance(part, Plain):
            parts = list(part.stages)
        elif isinstance(part, SegNet):
            parts = [*part.down, *part.up]
        else:
            continue
        for block in parts:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model
