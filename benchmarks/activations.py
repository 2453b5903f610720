"""Activations: memory, time and accuracy of training with `horovod_aps.activations`, against other ways to save memory.

Four parts, each adds its records to activations.json in --out and is skipped for what is there already:
  memory    peak resident size, saved bytes and time per step of five networks: plain, "auto", torch.utils.checkpoint,
            saved tensors as bfloat16; every run in a process of its own with one thread
  course    how much smaller ResNet-50's saved tensors are from step to step with "auto", at two learning rates
  accuracy  accuracy on CIFAR-10 photographs, mean IoU on CamVid street scenes, plain and "auto" over seeds
  speed     the codec beside memcpy on one thread

  python benchmarks/activations.py --data-dir data                       # all of it, results in out/studies
  python benchmarks/activations.py --parts memory --networks resnet50    # ResNet-50 at 160x160, batch 16
  python benchmarks/activations.py --show                                # what is shipped; nothing runs
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accuracy_tasks
import activation_models
import numpy as np
import studies
import torch
from studies import Records
from torch import Tensor, nn

NAME = "activations"
VARIANTS = ("plain", "auto", "checkpoint", "bf16")
# pixels, batch
SIZES = {"resnet18": (160, 16), "resnet50": (160, 16), "vgg16": (160, 8), "alexnet": (160, 16), "segnet": (160, 16)}
EPOCHS = {"classification": 8, "segmentation": 8}
WHAT = {"classification": "accuracy on CIFAR-10 in %", "segmentation": "mean IoU on CamVid in %"}
STEPS = 18
PARTS = ("speed", "memory", "course", "accuracy")
RATE = 0.01
COURSE = {0.01: 70, 0.001: 70}  # learning rate: steps
COURSE_STEPS = (1, 2, 3, 5, 9, 17, 33, 65)  # bounds are new in these


# ---- ways to save


def bf16_hooks(model: nn.Module) -> Any:
    """Saved tensors of floats as bfloat16; parameters stay."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    counted = [0]

    def pack(tensor: Tensor) -> Any:
        data = tensor.detach()
        if data.dtype != torch.float32 or data.numel() < 4096 or data.untyped_storage()._cdata in own:
            return data
        counted[0] += data.numel() * 2
        return data.to(torch.bfloat16)

    def unpack(data: Tensor) -> Tensor:
        return data.float() if data.dtype == torch.bfloat16 else data

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def plain_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """What plain training saves, every storage once, parameters left out."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    seen: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = (storage, storage.nbytes())  # held, so that addresses are not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for _, size in seen.values())


# ---- memory


def resident() -> tuple[int, int]:
    """(now, peak since the last reset) of this process, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def photographs(task: accuracy_tasks.Task, size: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch at this size; small photographs are enlarged, scenes cut."""
    index = torch.randperm(len(task.train_y), generator=torch.Generator().manual_seed(seed))[:batch]
    x, y = task.train_x[index], task.train_y[index]
    if task.name == "segmentation":
        y = nn.functional.interpolate(y[:, None].float(), size=(size, size), mode="nearest")[:, 0].long()
    return nn.functional.interpolate(x, size=(size, size), mode="bilinear").contiguous(), y


def measure(network: str, variant: str, data_dir: Path | None, steps: int, rate: float = RATE) -> dict[str, Any]:
    """One process: peak resident size above idle, bytes and time of `steps` training steps."""
    from horovod_aps.activations import ActivationCompressor

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size, batch = SIZES[network]
    task = accuracy_tasks.load("segmentation" if network == "segnet" else "classification", data_dir)
    if task.train_x.shape[1] == 1:
        task.train_x = task.train_x.expand(-1, 3, -1, -1)
    model = activation_models.build(network, size, task.n_classes)
    if variant == "checkpoint":
        activation_models.checkpoint_parts(model)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    saver = ActivationCompressor(model, optimizer) if variant == "auto" else None
    batches = [photographs(task, size, batch, seed) for seed in range(steps)]
    del task

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, ignore_index=accuracy_tasks.VOID)

    # Idle: weights, gradients, momentum and all libraries are there, and one picture has passed.
    loss_of(batches[0][0][:2], batches[0][1][:2]).backward()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.zero_grad(set_to_none=False)
    saved = None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    idle = resident()[0]
    Path("/proc/self/clear_refs").write_text("5")
    times, ratios, losses, ratio, stored = [], [], [], None, None
    for x, y in batches:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        with saver or (bf16_hooks(model) if variant == "bf16" else contextlib.nullcontext()):
            loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
        if saver is not None:
            ratios.append(saver.stats()["ratio"])
        print(f"{network} {variant}: {times[-1]:.2f} s, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    peak = resident()[1] - idle
    if saver is not None:
        stats = saver.stats()
        ratio, stored, saved = stats["ratio"], stats["stored_bytes"], stats["saved_bytes"]
    elif variant == "plain":
        saved = stored = plain_bytes(model, lambda: loss_of(*batches[0]))
    return {
        "part": "memory",
        "network": network,
        "variant": variant,
        "size": size,
        "batch": batch,
        "steps": steps,
        "rate": rate,
        "losses": losses,
        "idle_mb": idle / 1e6,
        "peak_mb": peak / 1e6,
        "saved_mb": None if saved is None else saved / 1e6,
        "stored_mb": None if stored is None else stored / 1e6,
        "ratio": ratio,
        "ratios": ratios,
        "seconds": statistics.median(times[1:]),
        "fastest": min(times[1:]),
    }


# ---- accuracy


def train(task: accuracy_tasks.Task, variant: str, seed: int, epochs: int) -> dict[str, Any]:
    """One training run; the variants see the same weights and the same batches."""
    from horovod_aps.activations import ActivationCompressor

    torch.manual_seed(seed)
    model = task.model()
    batch = 64 if task.name == "classification" else 8
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    saver = ActivationCompressor(model, optimizer) if variant == "auto" else None
    generator = torch.Generator().manual_seed(seed)
    n_steps, step, ratios = epochs * (len(task.train_y) // batch), 0, []
    for _ in range(epochs):
        order = torch.randperm(len(task.train_y), generator=generator)
        for index in order[: len(order) // batch * batch].split(batch):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 - step / n_steps)
            x = task.train_x[index]
            if torch.rand((), generator=generator) < 0.5:
                x = x.flip(-1)
            y = task.train_y[index] if torch.equal(x, task.train_x[index]) else _flipped(task, index)
            optimizer.zero_grad()
            with saver or (bf16_hooks(model) if variant == "bf16" else contextlib.nullcontext()):
                loss = task.loss(model, x, y)
            loss.backward()
            optimizer.step()
            step += 1
            if saver is not None and step > 10:
                ratios.append(saver.stats()["ratio"])
    return {
        "part": "accuracy",
        "task": task.name,
        "source": task.source,
        "variant": variant,
        "seed": seed,
        "epochs": epochs,
        "score": task.score(model),
        "ratio": statistics.mean(ratios) if ratios else None,
    }


def _flipped(task: accuracy_tasks.Task, index: Tensor) -> Tensor:
    labels = task.train_y[index]
    return labels.flip(-1) if task.name == "segmentation" else labels


# ---- speed


def speed() -> Records:
    """GB/s of float32 in, or out, on one thread, into memory that is there; normal numbers, also after ReLU."""
    from horovod_aps.activations import codec

    torch.set_num_threads(1)
    records = []
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(7_000_000, generator=generator)
    copy = torch.empty_like(normal)
    for what, x in (("normal", normal), ("relu", normal.relu())):
        for bound in (0.02, 0.1):
            stream = codec.encode(x, bound)

            def best(function: Callable[[], Any], x: Tensor = x) -> float:
                times = []
                for _ in range(15):
                    start = time.perf_counter()
                    function()
                    times.append(time.perf_counter() - start)
                return x.nbytes / min(times) / 1e9

            def memcpy(x: Tensor = x) -> None:
                ctypes.memmove(copy.data_ptr(), x.data_ptr(), x.nbytes)

            def encode(x: Tensor = x, bound: float = bound, stream: Tensor = stream) -> None:
                size = codec.library().aps_act_encode(x.data_ptr(), x.numel(), 0, bound, None, 0, 1)
                codec.library().aps_act_fetch(stream.data_ptr(), size)

            out = torch.empty_like(x)

            def decode(stream: Tensor = stream, out: Tensor = out) -> None:
                codec.library().aps_act_decode(
                    stream.data_ptr(), stream.numel(), out.data_ptr(), out.numel(), 0, None, 1
                )

            records.append(
                {
                    "part": "speed",
                    "values": what,
                    "bound": bound,
                    "ratio": x.nbytes / stream.nbytes,
                    "memcpy": best(memcpy),
                    "compress": best(encode),
                    "decompress": best(decode),
                }
            )
    return records


# ---- running and reporting


def same(record: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = ("part", "network", "variant", "task", "source", "seed", "epochs", "steps", "values", "bound", "rate")
    return all(record.get(key) == other.get(key) for key in keys)


def add(path: Path, new: Records) -> None:
    """Put records in place of those of the same settings."""
    records = read(path)
    records = [r for r in records if not any(same(r, n) for n in new)] + new
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"runs": records}, indent=1) + "\n")
    unfinished.replace(path)


def read(path: Path) -> Records:
    return json.loads(path.read_text())["runs"] if path.exists() else []


def mean_and_deviation(values: list[float]) -> str:
    return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values) if len(values) > 1 else 0:.1f}"


def memory_table(records: Records) -> str:
    """Markdown; factors are over plain training of the same network."""
    rows = [
        "| network | pixels, batch | variant | saved, MB | smaller | peak above idle, MB | smaller | s per step | longer |",  # noqa: E501
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for network in activation_models.NAMES:
        runs = {r["variant"]: r for r in records if r["part"] == "memory" and r["network"] == network}
        plain = runs.get("plain")
        for variant in VARIANTS:
            r = runs.get(variant)
            if r is None or plain is None:
                continue
            stored = f"{r['stored_mb']:.0f}" if r["stored_mb"] else ""
            ratio = f"{r['ratio']:.1f}x" if r["ratio"] else ""
            smaller, longer = plain["peak_mb"] / r["peak_mb"], r["seconds"] / plain["seconds"]
            rows.append(
                f"| {network} | {r['size']}, {r['batch']} | {variant} | {stored} | {ratio} | {r['peak_mb']:.0f} | "
                f"{smaller:.1f}x | {r['seconds']:.2f} | {longer:.2f}x |"
            )
    return "\n".join(rows)


def course_table(records: Records) -> str:
    """Markdown; how much smaller saved tensors are in the steps that have new bounds."""
    rows = [
        f"| learning rate | {' | '.join(f'step {step}' for step in COURSE_STEPS)} | loss, first and last 5 steps |",
        f"| --- |{' --- |' * (len(COURSE_STEPS) + 1)}",
    ]
    for r in records:
        if r["part"] == "course":
            ratios = [f"{r['ratios'][step - 1]:.1f}x" if step <= len(r["ratios"]) else "" for step in COURSE_STEPS]
            losses = [f"{statistics.mean(some):.2f}" for some in (r["losses"][:5], r["losses"][-5:])]
            rows.append(f"| {r['rate']} | {' | '.join(ratios)} | {', '.join(losses)} |")
    return "\n".join(rows)


def accuracy_table(records: Records) -> str:
    """Markdown; mean and standard deviation over seeds."""
    rows = ["| task | variant | seeds | score | saved tensors smaller |", "| --- | --- | --- | --- | --- |"]
    for task in accuracy_tasks.TASKS:
        for variant in VARIANTS:
            runs = [r for r in records if r["part"] == "accuracy" and r["task"] == task and r["variant"] == variant]
            if runs:
                ratios = [r["ratio"] for r in runs if r["ratio"]]
                scores = mean_and_deviation([r["score"] for r in runs])
                ratio = f"{statistics.mean(ratios):.1f}x" if ratios else ""
                what = WHAT[task] if runs[0]["source"] != "digits" else f"{task} of digits in %"
                rows.append(f"| {what}, {runs[0]['epochs']} epochs | {variant} | {len(runs)} | {scores} | {ratio} |")
    return "\n".join(rows)


def speed_table(records: Records) -> str:
    """Markdown; shares are of memcpy."""
    rows = [
        "| values | bound | smaller | memcpy, GB/s | compress | decompress |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in records:
        if r["part"] == "speed":
            shares = [f"{r[way]:.1f} ({r[way] / r['memcpy']:.2f})" for way in ("compress", "decompress")]
            rows.append(
                f"| {r['values']} | {r['bound']} | {r['ratio']:.1f}x | {r['memcpy']:.1f} | {' | '.join(shares)} |"
            )
    return "\n".join(rows)


def report(records: Records) -> str:
    """All tables."""
    parts = (
        ("Memory and time", memory_table),
        ("Course of training", course_table),
        ("Accuracy", accuracy_table),
        ("Speed", speed_table),
    )
    return "\n\n".join(f"## {title}\n\n{table(records)}" for title, table in parts) + "\n"


def save_plot(records: Records, path: Path) -> None:
    """Peak memory and time per step, by network and variant."""
    runs = [r for r in records if r["part"] == "memory"]
    networks = [n for n in activation_models.NAMES if any(r["network"] == n for r in runs)]
    if not networks:
        return
    plt = studies.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for axis, key, title in ((axes[0], "peak_mb", "peak above idle, MB"), (axes[1], "seconds", "seconds per step")):
        for i, variant in enumerate(VARIANTS):
            heights = [
                next((r[key] for r in runs if r["network"] == n and r["variant"] == variant), 0.0) for n in networks
            ]
            axis.bar(np.arange(len(networks)) + 0.2 * (i - 1.5), heights, 0.2, label=variant)
        axis.set_xticks(range(len(networks)), networks)
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=8)
    studies.save(figure, path)


def work(arguments: argparse.Namespace, network: str, variant: str, steps: int, rate: float) -> dict[str, Any]:
    """The record of `measure` in a process of its own with one thread."""
    command = [sys.executable, __file__, "--worker", network, variant, "--steps", str(steps), "--rate", str(rate)]
    command += ["--data-dir", str(arguments.data_dir)] if arguments.data_dir else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def run(arguments: argparse.Namespace, path: Path) -> None:
    """All records that are asked for and not there yet."""
    if "memory" in arguments.parts:
        for network in arguments.networks:
            for variant in arguments.variants:
                wanted = {"part": "memory", "network": network, "variant": variant, "steps": arguments.steps}
                wanted["rate"] = RATE
                if any(same(r, wanted) for r in read(path)) and not arguments.again:
                    continue
                add(path, [work(arguments, network, variant, arguments.steps, RATE)])
    if "course" in arguments.parts:
        for rate, steps in COURSE.items():
            wanted = {"part": "course", "network": "resnet50", "variant": "auto", "steps": steps, "rate": rate}
            if not any(same(r, wanted) for r in read(path)) or arguments.again:
                add(path, [work(arguments, "resnet50", "auto", steps, rate) | {"part": "course"}])
    if "speed" in arguments.parts:
        add(path, speed())
    if "accuracy" in arguments.parts:
        torch.set_num_threads(1)
        for name in arguments.tasks:
            task = accuracy_tasks.load(name, arguments.data_dir)
            epochs = arguments.epochs or EPOCHS[name]
            for seed in range(arguments.seeds):
                for variant in [v for v in arguments.variants if v != "checkpoint"]:
                    wanted = {"part": "accuracy", "task": name, "source": task.source, "variant": variant}
                    wanted |= {"seed": seed, "epochs": epochs}
                    if any(same(r, wanted) for r in read(path)) and not arguments.again:
                        continue
                    record = train(task, variant, seed, epochs)
                    print(f"{name} {variant} seed {seed}: {100 * record['score']:.1f}", flush=True)
                    add(path, [record])


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="folder with cifar10-small and camvid-small; else digits")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--networks", nargs="+", choices=activation_models.NAMES, default=list(activation_models.NAMES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tasks", nargs="+", choices=accuracy_tasks.TASKS, default=list(accuracy_tasks.TASKS))
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of a memory run")
    parser.add_argument("--rate", type=float, default=RATE, help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help=f"of accuracy runs, default {EPOCHS}")
    parser.add_argument("--again", action="store_true", help="run again what is there already")
    parser.add_argument("--worker", nargs=2, metavar=("NETWORK", "VARIANT"), help=argparse.SUPPRESS)
    arguments = studies.parse_arguments(parser, argv)
    if arguments.show:
        return studies.show(NAME)
    if arguments.worker:
        print(json.dumps(measure(*arguments.worker, arguments.data_dir, arguments.steps, arguments.rate)))
        return 0
    path = arguments.out / f"{NAME}.json"
    if not arguments.report:
        run(arguments, path)
    records = read(path)
    if not records:
        print(f"activations: no results in {arguments.out}", file=sys.stderr)
        return 1
    (arguments.out / f"{NAME}.md").write_text(report(records))
    save_plot(records, arguments.images / f"{NAME}.png")
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
