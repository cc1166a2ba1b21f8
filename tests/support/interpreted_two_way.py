"""The Triton kernels of two modalities, softplus sums, a bias per key and mean vectors equal their definitions."""

import pytest
import torch

from kontrast.kernels import (
    mean_vectors,
    row_statistics,
    softplus_sums,
    triton_operands,
    triton_wide_launch,
    two_way_statistics,
)

from support.statistics_cases import scalar, unit_rows, value_and_gradients

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def compare(compute, inputs, tolerance=1e-5):
    """Compare value and gradients of Triton in float32 with the definition in float64."""
    truth = value_and_gradients(lambda: compute("dense", *inputs), inputs)
    single = [x.detach().float().requires_grad_() for x in inputs]
    found = value_and_gradients(lambda: compute("triton", *single), single)
    assert len(found) == len(truth)
    for part, expected in zip(found, truth):
        assert (part.isneginf() == expected.isneginf()).all()
        part, expected = (x.double().masked_fill(x.isneginf(), 0) for x in (part, expected))
        assert (part - expected).norm() <= tolerance * max(1e-3, expected.norm())


@pytest.fixture(params=["few pairs", "many pairs"])
def pairs(request, monkeypatch):
    """Many pairs use the shortcut for bounded exponents, if the device finds that they are bounded."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if request.param == "many pairs":
        monkeypatch.setattr(triton_operands, "LARGE", 0)


@pytest.mark.parametrize("a", [5.0, 90.0])
@pytest.mark.parametrize(("with_mean", "detach"), [(False, False), (True, False), (True, True)])
def test_two_way_statistics(pairs, a, with_mean, detach, monkeypatch):
    monkeypatch.setattr(triton_wide_launch, "PANEL_SIDE", 64)  # several panels each way
    ids = torch.randint(0, 9, (40,)), torch.randint(0, 9, (150,))

    def compute(implementation, q, k, scale):
        rows, columns = two_way_statistics(
            q, k, scale=scale, query_ids=ids[0], key_ids=ids[1], with_mean=with_mean, detach_weights=detach,
            implementation=implementation,
        )  # fmt: skip
        return *rows, *columns

    compare(compute, [unit_rows(40, 70), unit_rows(150, 70), scalar(a)], 1e-5 if a < 50 else 1e-4)


@pytest.mark.parametrize("bias", [-10.0, 0.0, 3.0])
def test_softplus_sums(bias, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(triton_wide_launch, "PANEL_SIDE", 64)
    torch.set_num_threads(1)
    ids = torch.arange(40) % 20, torch.arange(150) % 60

    def compute(implementation, q, k, scale, b):
        return [softplus_sums(q, k, scale=scale, bias=b, query_ids=ids[0], key_ids=ids[1],
                              implementation=implementation)]  # fmt: skip

    compare(compute, [unit_rows(40, 70), unit_rows(150, 70), scalar(10.0), scalar(bias)])


@pytest.mark.parametrize(("D", "scale"), [(19, 5.0), (19, [5.0, -2.0]), (140, 5.0)])
@pytest.mark.parametrize("detach", [False, True])
def test_key_bias(pairs, D, scale, detach):
    """Narrow and wide rows; the bias is large enough to matter, and rows with the id 0 have all keys as pairs."""
    ids = torch.randint(0, 5, (40,)), torch.randint(1, 5, (150,))

    def compute(implementation, q, k, bias):
        return row_statistics(
            q, k, scale=scale, query_ids=ids[0], key_ids=ids[1], key_bias=bias, detach_weights=detach,
            implementation=implementation,
        )  # fmt: skip

    compare(compute, [unit_rows(40, D), unit_rows(150, D), (4 * torch.randn(150)).double().requires_grad_()])


@pytest.mark.parametrize(("E", "scale"), [(5, 5.0), (70, 0.0)])
def test_mean_vectors(E, scale, monkeypatch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    monkeypatch.setattr(triton_wide_launch, "PANEL_BYTES", 1)  # several panels
    ids = torch.arange(150) % 5, torch.arange(40) % 4

    def compute(implementation, q, k, v, bias):
        return [mean_vectors(q, k, values=v, scale=scale, query_ids=ids[0], key_ids=ids[1], key_bias=bias,
                             implementation=implementation)]  # fmt: skip

    bias = torch.randn(40, dtype=torch.float64, requires_grad=True)
    compare(compute, [unit_rows(150, 70), unit_rows(40, 70), unit_rows(40, E), bias])
