"""Compare the views with torchvision and kornia: first the pictures from the same draws, then views per second.

    python benchmarks/views.py [--device cpu|cuda] [--workers N] [--quick] [--json FILE]

The pictures: torchvision's functional transforms make each view again from the same draws; differences are in 1/255 of
the range. The race: ours on the device (in a CUDA graph, or on one CPU thread), torchvision v2 in worker processes of
one thread each, and kornia on the device if it is installed. On CUDA, also the share of the measured copy bandwidth
that reading each image once and writing each view once would take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kontrast.views import POLICIES, Draws, Policy, Views, keys

CASES = (
    ("simclr-cifar", 32, 32),
    ("cacr-cifar", 32, 32),
    ("moco-v2", 256, 224),
    ("simclr", 256, 224),
)  # policy, source, view


def through_torchvision(image: Tensor, draws: Draws, policy: Policy, size: int) -> Tensor:
    """Make one view of one uint8 image [C, H, W], C 1 or 3, by torchvision's functional transforms on a float tensor.

    `draws` are those of this view and image (0-dim tensors).
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    mode = InterpolationMode(policy.interpolation)
    box = [round(float(x)) for x in draws[:4]]
    x = tv.resized_crop(image.float() / 255, *box, [size, size], mode, antialias=True).clamp(0, 1)
    if draws.flip:
        x = tv.hflip(x)
    if draws.jitter:
        steps = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
        factors = (draws.brightness, draws.contrast, draws.saturation, draws.hue)
        for operation in draws.operations().tolist():
            x = steps[operation](x, float(factors[operation]))
    if draws.gray and len(x) == 3:
        x = tv.rgb_to_grayscale(x, 3)
    if draws.blur and policy.radius(size):
        kernel = 2 * policy.radius(size) + 1
        x = tv.gaussian_blur(x, [kernel, kernel], [float(draws.sigma)] * 2)
    if draws.solarize:
        x = tv.solarize(x, 0.5)
    return tv.normalize(x, _each(policy.mean, len(x)), _each(policy.std, len(x)))


def _each(values: tuple[float, ...], channels: int) -> list[float]:
    return list(values) * (channels // len(values))


def torchvision_policy(policy: Policy, size: int):
    """Return the policy as a torchvision v2 pipeline from a uint8 image to a normalized float tensor."""
    from torchvision.transforms import InterpolationMode, v2

    steps = [
        v2.RandomResizedCrop(
            size, policy.crop_scale, policy.crop_ratio, InterpolationMode(policy.interpolation), antialias=True
        )
    ]
    steps += [v2.RandomHorizontalFlip(policy.flip)]
    steps += [v2.RandomApply([v2.ColorJitter(*policy.jitter)], policy.jitter_p), v2.RandomGrayscale(policy.gray)]
    if policy.blur:
        steps += [v2.RandomApply([v2.GaussianBlur(2 * policy.radius(size) + 1, policy.blur_sigma)], policy.blur)]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(_each(policy.mean, 3), _each(policy.std, 3))]
    return v2.Compose(steps)


def kornia_policy(policy: Policy, size: int):
    """Return the policy as a kornia pipeline for a batch of float images."""
    import kornia.augmentation as K

    steps = [
        K.RandomResizedCrop((size, size), policy.crop_scale, policy.crop_ratio),
        K.RandomHorizontalFlip(p=policy.flip),
        K.ColorJitter(*policy.jitter, p=policy.jitter_p),
        K.RandomGrayscale(p=policy.gray),
    ]
    if policy.blur:
        kernel = 2 * policy.radius(size) + 1
        steps += [K.RandomGaussianBlur((kernel, kernel), policy.blur_sigma, p=policy.blur)]
    steps += [K.Normalize(torch.tensor(_each(policy.mean, 3)), torch.tensor(_each(policy.std, 3)))]
    return K.AugmentationSequential(*steps, data_keys=["input"])


def pictures(count: int, side: int, seed: int = 0) -> Tensor:
    """Make uint8 images [count, 3, side, side] with edges, gradients and noise: smooth ones would hide a bug."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    blocks = torch.rand(count, 3, 9, 9, generator=generator).round()
    x = torch.nn.functional.interpolate(coarse, side, mode="bilinear", align_corners=False) * 0.6
    x = x + torch.nn.functional.interpolate(blocks, side, mode="nearest") * 0.3
    return ((x + 0.1 * torch.rand(x.shape, generator=generator)) * 255).clamp(0, 255).to(torch.uint8)


def agreement(name: str, source: int, size: int, count: int, device: str) -> dict[str, float]:
    """Return the mean and the 99.9th percentile of the differences to torchvision from the same draws, in 1/255."""
    views = Views(name, 2, size)
    images, image_keys = pictures(count, source), keys(0, 0, torch.arange(count))
    draws = views.draw(image_keys, torch.full((count, 2), source))
    ours = views(images.to(device), image_keys.to(device)).cpu()
    theirs = torch.empty_like(ours)
    for v in range(2):
        for b in range(count):
            theirs[v, b] = through_torchvision(
                images[b], Draws(*(field[v, b] for field in draws)), views.policies[v], size
            )
    std = torch.tensor(_each(views.policies[0].std, 3))[:, None, None]
    difference = ((ours - theirs).abs() * std * 255).flatten()
    return {"mean": difference.mean().item(), "p99.9": difference.kthvalue(int(0.999 * len(difference))).values.item()}


def seconds_cpu(work: Callable[[int], object], budget: float) -> float:
    """Return the median seconds of `work(i)` on the CPU, repeated for `budget` seconds."""
    work(0)
    times, end = [], time.perf_counter() + budget
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        work(len(times))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def seconds_cuda(work: Callable[[int], object], sets: int, repeats: int, captured: bool) -> float:
    """Return the median seconds of one `work(i)`; i cycles through `sets` inputs, so that caches don't help."""
    for i in range(sets):
        work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            for i in range(sets):
                work(i)

    def once() -> None:
        if captured:
            graph.replay()
        else:
            for i in range(sets):
                work(i)

    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        once()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / sets)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return the bytes per second that a large copy on the device reads and writes."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / seconds_cuda(lambda i: y.copy_(x), 1, 9, False)


def ours(name: str, source: int, size: int, device: str, quick: bool, bandwidth: float | None) -> dict[str, float]:
    """Return our views per second."""
    batch = 512 if size <= 64 else 256
    if device == "cpu":
        batch //= 2 if size <= 64 else 16
        images, image_keys = pictures(batch, source), keys(0, 0, torch.arange(batch))
        views = Views(name, 2, size)
        return {"views_per_second": 2 * batch / seconds_cpu(lambda i: views(images, image_keys), 1 if quick else 4)}
    sets = 4
    images = [pictures(batch, source, seed).cuda() for seed in range(sets)]
    image_keys = [keys(0, seed, torch.arange(batch)).cuda() for seed in range(sets)]
    views = Views(name, 2, size, dtype=torch.bfloat16)
    outcome = {}
    for captured in (True, False):
        took = seconds_cuda(lambda i: views(images[i], image_keys[i]), sets, 10 if quick else 40, captured)
        outcome["views_per_second" if captured else "views_per_second_eager"] = 2 * batch / took
        if captured:
            least = batch * 3 * source**2 + 2 * batch * 3 * size**2 * 2
            outcome["share_of_bandwidth"] = least / took / bandwidth
    return outcome


class Pairs(torch.utils.data.Dataset):
    """Two torchvision views of each image."""

    def __init__(self, images: Tensor, policy: Policy, size: int, length: int):
        self.images, self.pipeline, self.length = images, torchvision_policy(policy, size), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index % len(self.images)]
        return self.pipeline(image), self.pipeline(image)


def torchvision_rate(name: str, source: int, size: int, workers: int, length: int) -> float:
    """Return the views per second of torchvision v2 in worker processes (0: in this one), after they have started."""
    policy = POLICIES.build(name)[0]
    batch = 64 if size <= 64 else 16
    data = Pairs(pictures(64, source), policy, size, length + max(workers, 1) * batch)
    loader = torch.utils.data.DataLoader(data, batch, num_workers=workers)
    seen, begin = 0, 0.0
    for step, (first, _) in enumerate(loader):
        if step == max(workers, 1) - 1:
            begin = time.perf_counter()
        elif step >= max(workers, 1):
            seen += 2 * len(first)
    return seen / (time.perf_counter() - begin)


def kornia_rate(name: str, source: int, size: int, device: str, quick: bool) -> float | None:
    """Return the views per second of kornia on the device, or None if it is not installed."""
    try:
        pipeline = kornia_policy(POLICIES.build(name)[0], size)
    except ImportError:
        return None
    images = pictures(256 if device == "cuda" else 16, source).to(device)
    if device == "cpu":
        took = seconds_cpu(lambda i: pipeline(images.float() / 255), 1 if quick else 4)
    else:
        took = seconds_cuda(lambda i: pipeline(images.float() / 255), 1, 5 if quick else 15, False)
    return len(images) / took


def show(title: str, case: dict) -> None:
    """Print one case."""
    differences = case["agreement_in_255ths"]
    print(
        f"{title}: difference to torchvision in 1/255: mean {differences['mean']:.4f}, 99.9% {differences['p99.9']:.3f}"
    )
    for key, value in case.items():
        if isinstance(value, float):
            print(f"    {key:<24} {value:,.3g}" if value < 100 else f"    {key:<24} {value:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--workers", type=int, default=None, help="torchvision's processes; default: all cores, on the CPU none"
    )
    parser.add_argument("--quick", action="store_true", help="fewer images and repeats")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    workers = options.workers if options.workers is not None else (os.cpu_count() if options.device == "cuda" else 0)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, one thread"
    bandwidth = copy_bandwidth() if options.device == "cuda" else None
    result = {
        "machine": machine,
        "torch": torch.__version__,
        "torchvision_workers": workers,
        "copy_bytes_per_second": bandwidth,
        "cases": {},
    }
    for name, source, size in CASES:
        case = {"agreement_in_255ths": agreement(name, source, size, 8 if options.quick else 32, options.device)}
        case |= ours(name, source, size, options.device, options.quick, bandwidth)
        length = (256 if options.quick else 1024) * max(1, workers) // (1 if size <= 64 else 8)
        case["torchvision"] = torchvision_rate(name, source, size, workers, length)
        case["kornia"] = kornia_rate(name, source, size, options.device, options.quick)
        case["ratio_torchvision"] = case["views_per_second"] / case["torchvision"]
        case["ratio_kornia"] = case["views_per_second"] / case["kornia"] if case["kornia"] else None
        result["cases"][f"{name} {source} to {size}"] = case
        show(f"{name} {source} -> {size}", case)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
