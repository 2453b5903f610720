"""One rank of a study's trainings: all methods take turns, an epoch each; rank 0 writes what came out.

Started by measured.py under the launcher, never by hand. All methods start from the same weights and see the same
batches of scikit-learn's digits.
"""

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WARM_UP = 5  # steps that do not count


class FullyConnected(nn.Module):
    """As AlexNet and VGG: most of 0.7 million parameters are in fully-connected layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(images).flatten(1))
        return out


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](first)))


class Convolutional(nn.Module):
    """As ResNet and Inception: convolutions with batch normalisation, 94 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(
            _Residual(32), nn.MaxPool2d(2), nn.Conv2d(32, 48, 3, padding=1), _Residual(48), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(F.relu(self.norm(self.first(images)))).mean((2, 3)))
        return out


class Recurrent(nn.Module):
    """An LSTM of 128 that reads a digit's rows one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.rnn(images[:, 0])
        out: Tensor = self.head(states[:, -1])
        return out


RELATIVES: dict[str, tuple[type[nn.Module], float]] = {
    "digits_fc": (FullyConnected, 0.05),
    "digits_conv": (Convolutional, 0.05),
    "digits_lstm": (Recurrent, 0.3),
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images and labels, test images and labels; every fifth digit is for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


class Run:
    """One network in training by one method."""

    def __init__(self, name: str, config: dict[str, Any], data: tuple[Tensor, ...]) -> None:
        import horovod.torch as hvd

        from horovod_aps.bench.methods import make_compression

        build, rate = RELATIVES[config["network"]]
        torch.manual_seed(config["seed"])
        self.net, self.data, self.config = build(), data, config
        inner = torch.optim.SGD(self.net.parameters(), lr=rate, momentum=0.9)
        named = [(f"{name}.{parameter}", value) for parameter, value in self.net.named_parameters()]
        self.optimizer: Any = hvd.DistributedOptimizer(inner, named, compression=make_compression(name))
        self.order = torch.Generator().manual_seed(config["seed"])
        self.times: list[float] = []
        self.curve: list[dict[str, float]] = []
        self.error = 0.0
        self.sent: list[float] = []

    def batches(self) -> list[Tensor]:
        """This rank's part of an epoch; all ranks shuffle alike and take turns."""
        import horovod.torch as hvd

        n, batch = len(self.data[0]), self.config["batch"]
        mine = torch.randperm(n, generator=self.order)[hvd.rank() :: hvd.size()]
        return list(mine[: n // (batch * hvd.size()) * batch].split(batch))

    def epoch(self) -> None:
        """One pass over the data, and the accuracy after it."""
        import horovod.torch as hvd

        from horovod_aps.bench.netns import interface_bytes

        interface = self.config["interface"]
        images, labels, test_images, test_labels = self.data
        hvd.barrier()
        before = interface_bytes(interface) if interface else None
        chosen = self.batches()
        for batch in chosen:
            start = time.perf_counter()
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(images[batch]), labels[batch]).backward()
            if not self.times:
                self.error = self._error_of_the_first(images[batch], labels[batch])
                with self.optimizer.skip_synchronize():
                    self.optimizer.step()
            else:
                self.optimizer.step()
            self.times.append(time.perf_counter() - start)
        hvd.barrier()
        after = interface_bytes(interface) if interface else None
        if before is not None and after is not None and len(self.times) > len(chosen):  # the first had the check in it
            self.sent.append((after - before) / len(chosen))
        self.net.eval()
        with torch.no_grad():
            hits = (self.net(test_images).argmax(1) == test_labels).float().mean()
        self.net.train()
        # The slowest rank's median: the first steps make buffers, and another program may take a core for a while.
        median = torch.tensor(statistics.median(self.times[WARM_UP:] or self.times))
        step = float(hvd.allreduce(median, op=hvd.Max, name="study.median"))
        accuracy = float(hvd.allreduce(hits, name="study.accuracy"))
        self.curve.append({"seconds": step * len(self.times), "step": len(self.times), "accuracy": accuracy})

    def _error_of_the_first(self, images: Tensor, labels: Tensor) -> float:
        """Of the averaged gradient, against a float32 average of the same ones."""
        import horovod.torch as hvd

        self.optimizer.synchronize()
        twin = RELATIVES[self.config["network"]][0]()
        twin.load_state_dict(self.net.state_dict())
        exact = torch.autograd.grad(F.cross_entropy(twin(images), labels), list(twin.parameters()))
        wanted = hvd.allreduce(torch.cat([one.flatten() for one in exact]), name="study.exact").double()
        got = torch.cat([p.grad.flatten() for p in self.net.parameters() if p.grad is not None]).double()
        return float((got - wanted).norm() / wanted.norm())

    def record(self) -> dict[str, Any]:
        """What came out; `identical` says whether all ranks hold the same weights."""
        import zlib

        import horovod.torch as hvd

        weights = torch.cat([p.detach().flatten() for p in self.net.parameters()])
        checksums = hvd.allgather_object(zlib.crc32(weights.numpy().tobytes()), name="study.checksum")
        step = self.curve[-1]["seconds"] / len(self.times)
        return {
            "step_s": step,
            "epoch_s": step * len(self.times) / len(self.curve),
            "bytes": statistics.fmean(self.sent) if self.sent else None,
            "error": self.error,
            "accuracy": self.curve[-1]["accuracy"],
            "curve": self.curve,
            "identical": len(set(checksums)) == 1,
        }


def main() -> None:
    import horovod.torch as hvd

    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    data = digits()
    runs = {method: Run(name, config, data) for method, name in config["methods"].items()}
    for epoch in range(config["epochs"]):
        names = list(runs)
        turn = epoch % len(names)
        for method in names[turn:] + names[:turn]:
            runs[method].epoch()
    found = {method: run.record() for method, run in runs.items()}
    if hvd.rank() == 0:
        with open(config["result"], "w") as file:
            json.dump(found, file)
    hvd.barrier()


if __name__ == "__main__":
    main()
