"""Optimizers against torch's own, LARS against an explicit loop, and steps skipped because of NaN gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kontrast.errors import CheckpointError, UsageError
from kontrast.optim.optimizers import OPTIMIZERS, build_optimizer


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5)]
    return nn.Sequential(*layers).double()


def backward(module: nn.Module, seed: int) -> None:
    x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    module(x).square().sum().backward()


def train(module: nn.Module, optimizer, steps: int = 6, rates=None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(module, step)
        if rates:
            optimizer.set_lr(rates[step])
        optimizer.step()


def groups(module: nn.Module, decay: float) -> list[dict]:
    """Parameter groups for torch.optim with no weight decay for 1-D parameters."""
    flat = [p for p in module.parameters() if p.ndim <= 1]
    rest = [p for p in module.parameters() if p.ndim > 1]
    return [{"params": rest, "weight_decay": decay}, {"params": flat, "weight_decay": 0.0}]


@pytest.mark.parametrize("exclude_1d", [False, True])
@pytest.mark.parametrize(
    ("name", "theirs", "arguments"),
    [
        ("sgd", "SGD", {"momentum": 0.9}),
        ("sgd", "SGD", {"momentum": 0.8, "nesterov": True}),
        ("sgd", "SGD", {"momentum": 0.0}),
        ("adamw", "AdamW", {"betas": (0.8, 0.99), "eps": 1e-6}),
        ("adam", "Adam", {"betas": (0.5, 0.999)}),
    ],
)
def test_equals_torch(name, theirs, arguments, exclude_1d):
    a, b = network(), network()
    ours = build_optimizer(a, name, 0.01, weight_decay=0.1, exclude_1d=exclude_1d, **arguments)
    groups_b = groups(b, 0.1) if exclude_1d else [{"params": list(b.parameters()), "weight_decay": 0.1}]
    reference = getattr(torch.optim, theirs)(groups_b, lr=0.01, **arguments)
    train(a, ours)
    for step in range(6):
        reference.zero_grad()
        backward(b, step)
        reference.step()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("lr_inside", [False, True])
def test_lars_equals_the_explicit_loop(lr_inside):
    a, b = network(), network()
    rates = [0.5, 1.0, 0.8, 0.3, 0.1, 0.05]
    optimizer = build_optimizer(a, "lars", 0.5, 0.9, 1e-2, lr_inside=lr_inside)
    train(a, optimizer, rates=rates)
    momentum = [torch.zeros_like(p) for p in b.parameters()]
    for step, lr in enumerate(rates):
        b.zero_grad()
        backward(b, step)
        with torch.no_grad():
            for p, m in zip(b.parameters(), momentum):
                g = p.grad
                if p.ndim > 1:
                    g = g + 1e-2 * p
                    g = g * (0.001 * p.norm() / g.norm())
                m.mul_(0.9).add_(lr * g if lr_inside else g)
                p.sub_(m if lr_inside else lr * m)
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)  # the learning rate is a float32 tensor


def test_lars_treats_vectors_as_plain_sgd():
    a, b = network(), network()
    lars, sgd = build_optimizer(a, "lars", 0.1, 0.9, 0.5), build_optimizer(b, "sgd", 0.1, 0.9, 0.0)
    for module, optimizer in ((a, lars), (b, sgd)):
        backward(module, 0)
        optimizer.step()
    for p, q in zip(a.parameters(), b.parameters()):
        assert torch.equal(p, q) == (p.ndim <= 1)


def test_lars_does_not_scale_the_gradient_if_a_norm_is_zero():
    module = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(module.weight)
    module.weight.grad = torch.ones(2, 3)
    build_optimizer(module, "lars", 0.5).step()
    torch.testing.assert_close(module.weight, torch.full((2, 3), -0.5))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_flagged_step_changes_nothing(name):
    module = network()
    optimizer = build_optimizer(module, name, 0.1, weight_decay=0.1)
    train(module, optimizer, 2)
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    for p in module.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step(found_inf=torch.ones(1))
    for old, new in zip(before, (module.state_dict(), optimizer.state_dict())):
        assert all(torch.equal(old[k], new[k]) for k in old)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_with_the_flag_unset_is_the_plain_step(name):
    a, b = network(), network()
    for module, flag in ((a, None), (b, torch.zeros(1))):
        optimizer = build_optimizer(module, name, 0.1, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad()
            backward(module, step)
            optimizer.step(found_inf=flag)
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-11)  # with a flag, LARS rounds its momentum to float32


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_rate_may_be_a_python_float(name):
    a, b = network(), network()
    for module, as_float in ((a, False), (b, True)):
        optimizer = build_optimizer(module, name, 0.25, weight_decay=0.1)
        if as_float:
            optimizer.lr = 0.25
        train(module, optimizer, 3)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_state_resumes_to_the_same_bits(name):
    whole, part = network(), network()
    train(whole, build_optimizer(whole, name, 0.01), 4)
    first = build_optimizer(part, name, 0.01)
    train(part, first, 2)
    saved = {k: v.clone() for k, v in first.state_dict().items()}
    again = build_optimizer(part, name, 0.01)
    again.load_state_dict(saved)
    for step in (2, 3):
        again.zero_grad()
        backward(part, step)
        again.step()
    for p, q in zip(whole.parameters(), part.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_memory_layout_changes_nothing(name):
    """torch's fused CPU kernels ignore strides, so a layout changed after construction needs care."""
    a, b = network(), network()
    x, y = build_optimizer(a, name, 0.05), build_optimizer(b, name, 0.05)
    b.to(memory_format=torch.channels_last)
    train(a, x)
    train(b, y)
    for module, optimizer in ((a, x), (b, y)):
        optimizer.zero_grad()
        backward(module, 9)
        module[0].weight.grad = module[0].weight.grad.contiguous()
        optimizer.step()
    assert b[0].weight.is_contiguous(memory_format=torch.channels_last)
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    for key, value in x.state_dict().items():
        torch.testing.assert_close(y.state_dict()[key], value, rtol=1e-7, atol=1e-9)


def test_frozen_and_unused_parameters_stay():
    module = network()
    module[0].requires_grad_(False)
    spare = nn.ModuleList([module, nn.Linear(2, 2).double()])
    optimizer = build_optimizer(spare, "sgd", 0.1, weight_decay=0.1)
    before = copy.deepcopy(spare.state_dict())
    train(module, optimizer, 1)
    after = spare.state_dict()
    changed = {k for k in after if "running" not in k and "tracked" not in k and not torch.equal(before[k], after[k])}
    assert changed == {"0.1.weight", "0.1.bias", "0.4.weight", "0.4.bias"}


def test_set_lr_writes_into_the_same_tensor():
    optimizer = build_optimizer(network(), "sgd", 0.1)
    address = optimizer.lr.data_ptr()
    optimizer.set_lr(0.25)
    assert optimizer.lr.ndim == 0 and optimizer.lr.data_ptr() == address and float(optimizer.lr) == 0.25


def test_bad_arguments_and_states_are_errors():
    module = network()
    with pytest.raises(UsageError, match="did you mean 'sgd'"):
        build_optimizer(module, "sgdd")
    with pytest.raises(UsageError, match="no argument 'momentum'"):
        build_optimizer(module, "adamw", 0.1, momentum=0.9)
    with pytest.raises(UsageError, match="no parameter to train"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UsageError, match="momentum"):
        build_optimizer(module, "sgd", momentum=1.5)
    state = build_optimizer(module).state_dict()
    with pytest.raises(CheckpointError, match=r"checkpoint.*average"):
        build_optimizer(module, "adamw").load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"checkpoint.*\(4, 3, 3, 3\)"):
        build_optimizer(module).load_state_dict({k: v[:1] for k, v in state.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_captured_step_follows_the_schedules_and_equals_the_eager_one(name):
    """Optimizer, teacher and bank in one CUDA graph, with the learning rate and the momentum changing outside."""
    from kontrast.networks import MemoryBank, Teacher

    def parts():
        module = network().float().cuda().to(memory_format=torch.channels_last)
        return module, build_optimizer(module, name, 0.01, weight_decay=0.1), Teacher(module), MemoryBank(10, 5).cuda()

    x = torch.randn(6, 3, 5, 5, device="cuda")
    flag, momentum = torch.zeros(1, device="cuda"), torch.ones((), device="cuda")

    def step(module, optimizer, teacher, bank):
        optimizer.zero_grad()
        teacher.update(module, momentum)
        bank.enqueue(teacher(x))
        module(x).square().sum().backward()
        optimizer.step(found_inf=flag)

    eager, captured = parts(), parts()
    graph = torch.cuda.CUDAGraph()
    for t in range(6):
        momentum.fill_(0.9 + 0.01 * t)
        for made in (eager, captured):
            made[1].set_lr(0.01 / (t + 1))
        step(*eager)
        if t < 3:
            step(*captured)
        else:
            if t == 3:
                captured[1].zero_grad()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    step(*captured)
            graph.replay()
    for a, b in zip((eager[0], eager[2], eager[3]), (captured[0], captured[2], captured[3])):
        for name_of, value in a.state_dict().items():
            torch.testing.assert_close(b.state_dict()[name_of], value, msg=name_of)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_too_large_for_float32_becomes_infinite(name):
    """It is not an error here: the training step reports numbers that are not finite, with the rate."""
    optimizer = build_optimizer(network(), name, 0.1)
    optimizer.set_lr(1e308)
    assert optimizer.lr.isinf()
