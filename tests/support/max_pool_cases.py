"""Max pooling beside torch's, for the interpreter and for a CUDA device."""

import torch
from torch.nn.functional import max_pool2d

CASES = {  # shape of the input, window, step, padding
    "small-alexnet": ((1, 96, 9, 9), 3, 2, 0),
    "odd sides, odd channels": ((2, 5, 10, 7), 3, 2, 0),
    "padded, as in ResNet": ((1, 64, 8, 8), 3, 2, 1),
    "windows side by side": ((2, 8, 8, 8), 2, 2, 0),
    "windows far apart": ((2, 4, 11, 11), 2, 3, 0),
    "every pixel": ((1, 3, 6, 5), 3, 1, 1),
    "one output": ((2, 4, 3, 3), 3, 2, 0),
    "no image": ((0, 4, 5, 5), 3, 2, 0),
    "ties": ((2, 8, 9, 9), 3, 2, 0),
    "not a number": ((2, 8, 9, 9), 3, 2, 0),
    "minus infinity": ((2, 8, 9, 9), 3, 2, 1),
}


def picture(case: str, device: str) -> torch.Tensor:
    x = torch.randn(CASES[case][0], device=device)
    if case == "ties":
        x = x.relu().round()
    if case == "not a number":
        x[torch.rand_like(x) < 0.05] = float("nan")
    if case == "minus infinity":
        x = torch.full_like(x, float("-inf"))
    return x.to(memory_format=torch.channels_last)


def agree(case: str, device: str, forward, gradient) -> None:
    """Outputs and gradients are torch's; a window's gradient goes to the first of its largest."""
    shape, kernel, stride, padding = CASES[case]
    x = picture(case, device).requires_grad_()
    expected = max_pool2d(x, kernel, stride, padding)
    given = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, x, given)
    found, places = forward(x.detach(), kernel, stride, padding)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(gradient(given, places, *shape[2:], kernel, stride, padding), wanted)
