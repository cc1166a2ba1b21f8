"""Compare the fused views with their definition: as a script with TRITON_INTERPRET=1, or on a CUDA device."""

from __future__ import annotations

import json

import torch

from kontrast.views import Views, keys

# name: policy, channels, height, width, size, ragged, in tiles of 16 x 16, other arguments
CASES = {
    "whole": ("cacr-cifar", 3, 16, 16, 16, False, False, {}),
    "whole, odd size, planes": ("simclr-cifar", 3, 16, 14, 11, True, False, {"channels_last": False}),
    "whole, one channel": ("cacr-cifar", 1, 12, 16, 10, False, False, {}),
    "whole, extra channels": ("simclr-cifar", 5, 12, 16, 10, False, False, {"planes": 2}),
    "whole, blurred, solarized": ("moco-v3", 3, 20, 18, 12, True, False, {}),
    "tiles": ("simclr-cifar", 3, 40, 30, 34, False, True, {}),
    "tiles, no jitter": ("crop-flip", 3, 30, 40, 34, True, True, {}),
    "tiles, bicubic, blurred": ("simclr", 3, 20, 16, 18, False, True, {"blur": 1.0, "blur_kernel": None}),
    "tiles, one channel, blurred": ("moco-v2", 1, 16, 16, 18, False, True, {"dtype": torch.float16}),
    "center": ("evaluate-imagenet", 3, 30, 20, 12, True, False, {}),
    "shrunk, bicubic": ("evaluate", 3, 24, 20, 7, False, False, {"interpolation": "bicubic"}),
}


def defined_and_fused(case: str, device: str, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a case's views by the definition on the CPU, and fused on the device."""
    from kontrast.views import triton_views

    policy, channels, height, width, size, ragged, tiled, arguments = CASES[case]
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator)
    image_keys = keys(3, 1, torch.arange(batch))
    extents = [torch.randint(1, side + 1, (batch,), generator=generator) for side in (height, width)]
    sizes = torch.stack(extents, 1) if ragged else None
    defined = Views(policy, 2, size, implementation="torch", **{**arguments, "dtype": torch.float32})(
        images, image_keys, sizes
    )
    before = triton_views.WHOLE, triton_views.WIDEST, triton_views.PIXELS
    if tiled:
        triton_views.WHOLE, triton_views.WIDEST, triton_views.PIXELS = 8, 16, 256
    try:
        moved = [None if x is None else x.to(device) for x in (images, image_keys, sizes)]
        fused = Views(policy, 2, size, implementation="triton", **arguments)(*moved)
    finally:
        triton_views.WHOLE, triton_views.WIDEST, triton_views.PIXELS = before
    return defined, fused.float().cpu()


def count_differing_draws(device: str, count: int) -> dict[str, int]:
    """Count for each field how many draws differ between the definition on the CPU and the kernel."""
    from kontrast.views import triton_views

    image_keys = keys(5, 2, torch.arange(count))
    sizes = torch.randint(1, 600, (count, 2), generator=torch.Generator().manual_seed(0))
    differing = {}
    for policy in ("moco-v3", "evaluate-imagenet"):
        views = Views(policy, 3, 24)
        defined = views.draw(image_keys, sizes)
        rows = views._table(torch.device(device))
        kernel = triton_views.draw(rows, image_keys.to(device), sizes.to(device), (600, 600), 24, 0).cpu()
        for column, name in enumerate(defined._fields):
            differing[f"{policy} {name}"] = int((getattr(defined, name).reshape(-1).float() != kernel[:, column]).sum())
    return differing


if __name__ == "__main__":
    torch.set_num_threads(1)
    report = {"draws": count_differing_draws("cpu", 100)}
    for case in CASES:
        ragged = CASES[case][5]
        defined, fused = defined_and_fused(case, "cpu", 2 if ragged else 1)  # the interpreter is slow
        report[case] = float((defined - fused).abs().nan_to_num(9e9).max())
    print(json.dumps(report))
