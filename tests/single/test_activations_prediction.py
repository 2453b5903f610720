"""Streams that are decoded beside others: predicted results of ReLUs, wider bounds where a ReLU is off."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from horovod_aps import kernels
from horovod_aps.activations import ActivationCompressor, codec
from horovod_aps.activations.codec import Guide, Source, Stream

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ODD = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 6e4, -6e4])


def check(x: torch.Tensor, bound: float, guide: Guide) -> Stream:
    """Both instruction sets give the same bytes and values; bound, zeros, signs and what is not finite hold."""
    lib, n = kernels.library(), x.numel()
    streams, decoded = [], []
    try:
        for vectors in (0, 1):
            lib.aps_use_vectors(vectors)
            streams.append(codec.encode(x, bound, guide))
        for vectors in (0, 1):
            lib.aps_use_vectors(vectors)
            decoded.append(codec.decode(streams[0], n, x.dtype, guide))
    finally:
        lib.aps_use_vectors(2)
    assert torch.equal(*streams)
    assert torch.equal(decoded[0].view(torch.uint8), decoded[1].view(torch.uint8))
    y, limit = decoded[0], torch.full((n,), bound, dtype=torch.float64)
    if guide.mask is not None:
        limit[codec.unpack_mask(guide.mask, n, torch.float32) == 0] *= 2**guide.coarse
    finite = x.isfinite()
    assert ((x.double() - y.double()).abs() <= limit)[finite].all()
    assert torch.equal(x[finite].sign(), y[finite].sign())
    assert torch.equal(x[~finite].view(torch.uint8), y[~finite].view(torch.uint8))
    return Stream(streams[0], n, x.dtype, guide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_hold_beside_masks_and_predictions(dtype):
    generator = torch.Generator().manual_seed(5)
    for trial, n in enumerate((1, 63, 64, 100, 4096, 4097, 30001, 70000)):
        for bound in (0.0, 1e-3, 0.02, 0.3):
            x = torch.randn(n, generator=generator).to(dtype)
            if trial % 2:
                some = torch.randint(0, n, (1 + n // 300,), generator=generator)
                x[some] = ODD[torch.randint(0, len(ODD), some.shape, generator=generator)].to(dtype)
            scale, shift = torch.randn(2, 7, generator=generator).unbind()
            channel = torch.arange(n) // 13 % 7
            r = torch.relu(scale[channel] * x.float() + shift[channel]).to(dtype)
            mask = codec.pack_mask(r, positive=True)
            first = check(x, bound, Guide(mask, trial % 9))
            source = Source(first, scale.contiguous(), shift.contiguous(), 13)
            second = check(r, bound, Guide(mask if trial % 3 else None, 0, (source,)))
            check(
                torch.relu(r.float() + scale[channel] * x.float()).to(dtype),
                bound,
                Guide(mask, 0, (source, Source(second))),
            )
            check(x.flip(0), bound, Guide(mask, 0, (source,)))  # a prediction that is wrong


def test_a_stream_is_not_decoded_beside_something_else():
    x = torch.randn(5000)
    mask = codec.pack_mask(x, positive=True)
    plain, guided = codec.encode(x, 0.1), codec.encode(x, 0.1, Guide(mask, 3))
    for stream, guide in (
        (plain, Guide(mask, 3)),
        (guided, None),
        (guided, Guide(mask, 0, (Source(Stream(plain, 5000, x.dtype)),))),
    ):
        with pytest.raises(ValueError, match="malformed"):
            codec.decode(stream, 5000, x.dtype, guide)


def test_errors_of_wide_bounds_do_not_follow_the_values():
    """Not much: what is left comes from the bin that is cut at zero."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(2)) + 0.3
    guide = Guide(torch.zeros(50_000, dtype=torch.uint8), 6)
    error = codec.decode(codec.encode(x, 0.5 / 64, guide), x.numel(), x.dtype, guide) - x
    deviation = float(error.std())
    assert 0.2 < deviation < 0.5 / 3**0.5
    for weight in (torch.ones_like(x), x, x.square()):
        assert abs(float((error * weight).mean())) < 0.06 * deviation * float(weight.square().mean().sqrt())


class Block(nn.Module):
    """A residual block, with its sum and ReLUs as they are found in the wild."""

    def __init__(self, channels: int, shortcut: bool, inplace: bool, functional: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)) if shortcut else nn.Identity()
        )
        self.relu = torch.relu if functional else nn.ReLU(inplace=inplace)
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.inplace:
            out += self.shortcut(x)
        else:
            out = out + self.shortcut(x)
        return self.relu(out)


def network(inplace: bool = True, functional: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(8, shortcut, inplace, functional) for shortcut in (True, False, False)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.Flatten(), nn.Linear(8 * 22 * 22, 5))


def steps(
    model: nn.Module, saver: ActivationCompressor, optimizer: torch.optim.Optimizer, n: int, amp: bool = False
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    for step in range(n):
        x, y = torch.randn(8, 3, 24, 24, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        if amp == "last":
            x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with saver, torch.autocast("cpu", torch.bfloat16, enabled=amp is True):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        if step < n - 1:
            loss.backward()
            optimizer.step()
    return loss


@pytest.mark.parametrize("kind", ["inplace", "not", "functional", "amp", "last"])
def test_residual_blocks_are_predicted(kind):
    model = network(kind in ("inplace", "amp", "last"), kind == "functional")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    saver = ActivationCompressor(model, optimizer)
    loss = steps(model, saver, optimizer, 3, {"amp": True, "last": "last"}.get(kind, False))
    stats = saver.stats()
    layers = stats["layers"]
    # The last ReLU's result goes to the linear layer; the first convolution of block 1 saves the input of the blocks.
    # In channels last it gets a copy.
    for name in ("1.conv2", "2.conv1", "2.conv2", "3.conv1", "3.conv2", *(["5"] if kind != "last" else [])):
        assert layers[name]["predicted"], name
    for name in ("1.bn1", "1.bn2", "1.shortcut.1", "2.bn2", "3.bn2") if kind != "last" else ():
        assert layers[name]["off_bound"] > layers[name]["bound"], name
    assert not layers["1.conv1"]["predicted"]
    plain = ActivationCompressor(model, optimizer, error_bound=1e-6)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))
    optimizer.zero_grad()
    other = steps(model, plain, optimizer, 1, {"amp": True, "last": "last"}.get(kind, False))
    assert other.isfinite()


def test_gradients_stay_near_those_of_plain_training():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    saver = ActivationCompressor(model, optimizer)
    for _ in range(3):
        loss = steps(model, saver, optimizer, 3)
    loss.backward()
    near = [p.grad.clone() for p in model.parameters()]
    x, y = None, None
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x, y = torch.randn(8, 3, 24, 24, generator=generator), torch.randint(0, 5, (8,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    for (name, parameter), got in zip(model.named_parameters(), near, strict=True):
        if not name.endswith(("shortcut.0.bias", "0.bias")):  # in front of a batch norm: zero but for rounding
            assert float((got - parameter.grad).norm()) < 0.05 * float(parameter.grad.norm()), name


def test_no_wider_bound_where_a_gradient_comes_back():
    """The output of a batch norm that goes elsewhere too needs all of its input."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.after = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.bn(self.conv(x))
            return self.after(torch.relu(y)).mean((2, 3)) + y.mean((2, 3))

    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    saver = ActivationCompressor(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        with saver:
            loss = model(torch.randn(8, 3, 24, 24)).square().sum()
        loss.backward()
        optimizer.step()
    layers = saver.stats()["layers"]
    assert layers["bn"]["off_bound"] is None and layers["after"]["predicted"]


def test_nothing_is_left_behind():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    saver = ActivationCompressor(model, optimizer)
    loss = steps(model, saver, optimizer, 3)
    entries = [weakref.ref(entry) for entry in saver._entries.values()]
    assert any(entry().is_predicted for entry in entries)
    contents = [weakref.ref(entry()._content) for entry in entries if entry()._content is not None]
    loss.backward()
    gc.collect()
    assert not any(entry() for entry in entries) and not any(content() is not None for content in contents)
    with pytest.raises(RuntimeError, match="stop"), saver:
        model[:3](torch.randn(8, 3, 24, 24))
        model[1].bn1(model[1].conv1(torch.randn(8, 8, 22, 22, requires_grad=True)))  # its input waits
        raise RuntimeError("stop")
    gc.collect()
    assert not saver._pass.waiting and not len(saver._entries)


def test_a_tensor_changed_while_it_waits_is_an_error():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    saver = ActivationCompressor(model, optimizer)
    steps(model, saver, optimizer, 3)
    with saver:
        x = model[1].conv1(torch.randn(8, 8, 22, 22))
        y = model[1].bn1(x)
        with torch.no_grad():
            x.add_(1)
        loss = torch.relu(y).sum()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
