"""Split and synchronized batch norm against plain batch norm on the parts and on the joined batch."""

from __future__ import annotations

import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as ranks
import torch.multiprocessing as processes
from torch import nn

from kontrast.errors import UsageError
from kontrast.networks import convert_split_batch_norm, encoder, shuffle, smallest_batch, unshuffle
from kontrast.networks.split_batch_norm import permutation
from kontrast.networks.sync_batch_norm import synchronize_batch_norm


def norm(ndim: int) -> nn.Module:
    plain = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[ndim](3, momentum=0.3)
    nn.init.uniform_(plain.weight)
    nn.init.normal_(plain.bias)
    return plain


@pytest.mark.parametrize("shape", [(12, 3), (12, 3, 4, 4), (12, 3, 2, 2, 2)])
def test_each_split_is_plain_batch_norm_on_its_part(shape):
    plain = norm(len(shape))
    split = convert_split_batch_norm(copy.deepcopy(plain), 4)
    x = 2 * torch.randn(shape) + 1
    parts = [copy.deepcopy(plain) for _ in range(4)]
    expected = torch.cat([p(part) for p, part in zip(parts, x.tensor_split(4))])
    torch.testing.assert_close(split(x), expected)
    for name in ("running_mean", "running_var"):
        average = torch.stack([getattr(p, name) for p in parts]).mean(0)
        torch.testing.assert_close(getattr(split, name), average)
    assert split.num_batches_tracked == 1


def test_one_split_is_plain_and_evaluation_too():
    plain = norm(4)
    one = convert_split_batch_norm(copy.deepcopy(plain), 1)
    four = convert_split_batch_norm(copy.deepcopy(plain), 4)
    x = torch.randn(8, 3, 4, 4)
    torch.testing.assert_close(one(x), plain(x))
    torch.testing.assert_close(one.running_var, plain.running_var)
    four.load_state_dict(plain.state_dict())
    torch.testing.assert_close(four.eval()(x), plain.eval()(x))


def test_an_output_depends_only_on_its_split():
    split = convert_split_batch_norm(norm(2), 2)
    x = torch.randn(8, 3)
    other = x.clone()
    other[5] += 10
    before, after = split(x), split(other)
    assert torch.equal(before[:4], after[:4])
    assert (before[4:] - after[4:]).abs().min() > 0


def test_shuffled_keys_have_other_partners():
    """A key's statistics must come from other images than its query's."""
    x = torch.arange(64)
    mixed, _ = shuffle(x, torch.tensor(3))
    partners = {int(i): set(part.tolist()) for part in mixed.split(8) for i in part}
    assert all(partners[int(i)] != set(part.tolist()) for part in x.split(8) for i in part)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1000])
def test_unshuffle_undoes_shuffle(count):
    x = torch.randn(count, 3)
    mixed, order = shuffle(x, torch.tensor(11))
    assert torch.equal(unshuffle(mixed, order), x)
    assert torch.equal(order.sort().values, torch.arange(count))
    assert count < 7 or not torch.equal(mixed, x)


def test_the_permutation_is_a_function_of_its_key():
    keys = [permutation(50, torch.tensor(k)) for k in range(20)]
    assert torch.equal(keys[4], permutation(50, torch.tensor(4)))
    assert len({tuple(k.tolist()) for k in keys}) == 20
    first = torch.stack([permutation(8, torch.tensor(k))[0] for k in range(4000)])
    assert (torch.bincount(first, minlength=8) - 500).abs().max() < 100  # 5 standard deviations


def test_conversion_reaches_every_norm_and_keeps_the_state():
    plain = encoder("small-resnet", width=16)
    split = convert_split_batch_norm(copy.deepcopy(plain), 2)
    assert split.state_dict().keys() == plain.state_dict().keys()
    assert not any(type(m) is nn.BatchNorm2d for m in split.modules())
    assert (smallest_batch(plain), smallest_batch(split), smallest_batch(nn.Linear(2, 2))) == (2, 4, 1)
    with pytest.raises(UsageError, match="3 in 2 splits"):
        split.train()(torch.rand(3, 3, 32, 32))
    with pytest.raises(UsageError, match="5 in 2 splits"):
        split(torch.rand(5, 3, 32, 32))


def on_two_ranks(rank: int, folder: str) -> None:
    """Send half of a batch through synchronized norm and a shuffle on each rank, and save the outputs."""
    torch.set_num_threads(1)
    ranks.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    saved = torch.load(f"{folder}/in.pt")
    module = synchronize_batch_norm(saved_network(saved["state"]))
    x = saved["x"].chunk(2)[rank].clone().requires_grad_()
    y = module(x)
    (y * saved["weights"].chunk(2)[rank]).sum().backward()
    for p in module.parameters():
        ranks.all_reduce(p.grad)
    mixed, order = shuffle(x.detach(), torch.tensor(5))
    back = unshuffle(mixed * 2, order)
    grads = [p.grad for p in module.parameters()]
    torch.save({"y": y.detach(), "x": x.grad, "grads": grads, "state": module.state_dict(), "mixed": mixed,
                "back": back}, f"{folder}/out{rank}.pt")  # fmt: skip
    ranks.destroy_process_group()
    os._exit(0)  # torch's threads sometimes abort a process that ends in the usual way


def network() -> nn.Sequential:
    """A network with both kinds of running statistics: a moving average, and the average of all batches."""
    norms = nn.BatchNorm2d(4), nn.BatchNorm1d(16, momentum=None)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), nn.Flatten(), norms[1]).double()


def saved_network(state: dict) -> nn.Module:
    module = network()
    module.load_state_dict(state)
    return module


@pytest.mark.skipif(not ranks.is_available(), reason="torch was built without distributed")
def test_two_ranks_equal_one_process_on_the_joined_batch():
    fresh = network()
    x = torch.randn(10, 3, 4, 4, dtype=torch.float64)
    weights = torch.randn(10, 16, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"state": fresh.state_dict(), "x": x, "weights": weights}, os.path.join(folder, "in.pt"))
        processes.start_processes(on_two_ranks, (folder,), nprocs=2, start_method="fork")
        out = [torch.load(os.path.join(folder, f"out{r}.pt")) for r in range(2)]
    whole = x.clone().requires_grad_()
    y = fresh(whole)
    (y * weights).sum().backward()
    torch.testing.assert_close(torch.cat([o["y"] for o in out]), y.detach())
    torch.testing.assert_close(torch.cat([o["x"] for o in out]), whole.grad)
    for mine, theirs in zip(out[0]["grads"], fresh.parameters()):
        torch.testing.assert_close(mine, theirs.grad)
    for o in out:
        for name, value in fresh.state_dict().items():
            torch.testing.assert_close(o["state"][name], value)
    torch.testing.assert_close(torch.cat([o["back"] for o in out]), 2 * x)
    joined = torch.cat([o["mixed"] for o in out])
    assert torch.equal(joined, x[permutation(10, torch.tensor(5))])
    assert not torch.equal(joined, x)


@pytest.mark.parametrize("splits", [1, 2])
def test_views_in_one_forward_equal_one_forward_per_view(splits):
    """Values, gradients and running statistics of three views in one batch, or one after the other."""
    apart = convert_split_batch_norm(norm(4), splits).double()
    together = copy.deepcopy(apart)
    for module in together.modules():
        module.views = 3
    x = torch.randn(3, 8, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    one = torch.cat([apart(view) for view in x])
    gradient = torch.randn_like(one)
    (expected,) = torch.autograd.grad(one, x, gradient)
    other = together(x.flatten(0, 1))
    (found,) = torch.autograd.grad(other, x, gradient)
    torch.testing.assert_close(other, one)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(together.state_dict(), apart.state_dict())


def test_without_momentum_the_running_statistics_are_the_average_of_all_batches():
    plain = nn.BatchNorm1d(4, momentum=None).double()
    split = convert_split_batch_norm(copy.deepcopy(plain), 1)
    split.views = 2
    for _ in range(3):
        views = torch.randn(2, 8, 4, dtype=torch.float64)
        for view in views:
            plain(view)
        split(views.flatten(0, 1))
        torch.testing.assert_close(split.state_dict(), plain.state_dict())
