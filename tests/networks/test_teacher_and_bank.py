"""The momentum teacher against its closed form, and the memory bank against a list."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import normalize
from torchvision.ops import StochasticDepth

from kontrast.networks import MemoryBank, Teacher
from kontrast.networks.vit import DropPath


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_parameters_follow_the_closed_form(as_tensor):
    """After n updates towards a fixed student: p_s + m^n (p_0 - p_s)."""
    student = network().double()
    teacher = Teacher(student)
    before = [p.clone() for p in teacher.parameters()]
    with torch.no_grad():
        for p in student.parameters():
            p.add_(torch.randn_like(p))
    m = torch.tensor(0.9, dtype=torch.float64) if as_tensor else 0.9
    for _ in range(7):
        teacher.update(student, m)
    for p, start, goal in zip(teacher.parameters(), before, student.parameters()):
        torch.testing.assert_close(p, goal + 0.9**7 * (start - goal))


def test_momentum_one_keeps_and_zero_copies_the_parameters():
    student = network()
    teacher = Teacher(student)
    start = copy.deepcopy(teacher.state_dict())
    with torch.no_grad():
        student[0].weight.add_(1.0)
    teacher.update(student, torch.tensor(1.0))
    assert all(torch.equal(v, start[k]) for k, v in teacher.state_dict().items())
    teacher.update(student, 0.0)
    torch.testing.assert_close(teacher.module[0].weight, student[0].weight)


def test_batch_norm_statistics_are_the_teachers_own():
    student = network()
    teacher = Teacher(student).train()
    student(torch.randn(16, 4) + 5)
    teacher.update(student, 0.5)
    assert teacher.module[1].num_batches_tracked == 0 and student[1].num_batches_tracked == 1
    teacher(torch.randn(16, 4))
    assert teacher.module[1].num_batches_tracked == 1
    assert not torch.equal(teacher.module[1].running_mean, student[1].running_mean)


@pytest.mark.parametrize(
    ("drop_path", "rate"), [(lambda: DropPath(0.5), "drop_prob"), (lambda: StochasticDepth(0.5, "row"), "p")]
)
def test_the_teacher_leaves_out_no_branches_whichever_library_made_them(drop_path, rate):
    student = nn.Sequential(nn.Linear(4, 4), drop_path())
    teacher, x = Teacher(student), torch.randn(16, 4)
    assert torch.equal(teacher(x), teacher.module[0](x))
    assert getattr(student[1], rate) == 0.5


def test_keys_carry_no_gradient():
    student = network()
    teacher = Teacher(student)
    x = torch.randn(8, 4)
    keys = teacher(x)
    assert not keys.requires_grad
    (student(x) * keys).sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert all(p.grad is not None and p.requires_grad for p in student.parameters())


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 12), batches=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_the_bank_has_the_last_keys_for_any_batch_sizes(size, batches):
    bank = MemoryBank(size, 2, normalize=False)
    written: list[torch.Tensor] = []
    for number, count in enumerate(batches):
        keys = torch.stack([torch.full((count,), float(number)), torch.arange(count).float()], 1)
        bank.enqueue(keys)
        written += list(keys)
    last = torch.stack(written[-size:])
    places = [(len(written) - len(last) + i) % size for i in range(len(last))]
    assert torch.equal(bank.rows[places], last)
    assert int(bank.pointer) == len(written) % size


def test_rows_have_unit_length_unless_normalize_is_false():
    bank, raw = MemoryBank(8, 5), MemoryBank(8, 5, normalize=False)
    torch.testing.assert_close(bank.rows.norm(dim=1), torch.ones(8))
    keys = 3 * torch.randn(3, 5)
    bank.enqueue(keys)
    raw.enqueue(keys)
    torch.testing.assert_close(bank.rows[:3], normalize(keys, dim=1))
    assert torch.equal(raw.rows[:3], keys)


def test_the_state_dict_has_rows_and_pointer():
    bank, other = MemoryBank(6, 3), MemoryBank(6, 3, seed=1)
    bank.enqueue(torch.randn(4, 3))
    other.load_state_dict(bank.state_dict())
    bank.enqueue(torch.ones(5, 3))
    other.enqueue(torch.ones(5, 3))
    assert torch.equal(bank.rows, other.rows) and int(other.pointer) == 3


def test_keys_may_be_added_before_the_backward_pass():
    bank = MemoryBank(6, 3)
    q = torch.randn(2, 3, requires_grad=True)
    loss = (q @ bank().T).exp().sum()
    bank.enqueue(torch.randn(6, 3))
    loss.backward()
    assert torch.isfinite(q.grad).all()


def test_keys_of_another_width_are_an_error():
    with pytest.raises(RuntimeError, match=r"shape: 3 .*shape: 4"):
        MemoryBank(6, 3).enqueue(torch.randn(2, 4))
