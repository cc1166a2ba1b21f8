"""SwAV and DINO: their definitions with every input, their identities, and the mistakes that public code has made.

V views, B images, W assigning views, M rows of a queue, K prototypes, D width.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize, one_hot

from kontrast.kernels import sinkhorn_potentials
from kontrast.networks import Prototypes
from kontrast.objectives import DINO, SwAV, prototype_objective
from kontrast.objectives.scheduled_number import on_device

from support.objective_definitions import dino, mean, prediction, sinkhorn, swav

B, D, K = 6, 5, 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return normalize(draw(*shape, seed=seed), dim=-1)


Z, C = draw(4, B, D), unit(K, D, seed=1)
KEYS, KEY_C, BANK = draw(2, B, D, seed=2), unit(K, D, seed=3), unit(2, 9, D, seed=4)


def small_dino(**arguments) -> DINO:
    return DINO(K, **arguments)


def assert_same_loss_and_gradients(ours, definition, views: int = 4) -> None:
    """Compare the value, and the gradients to z and to the prototypes, of two functions of both."""
    leaves = Z[:views].clone().requires_grad_(), C.clone().requires_grad_()
    found, expected = ours(*leaves), definition(*leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


# Definitions


@pytest.mark.parametrize("views", [2, 4])
def test_swav_with_teacher_and_queues(views) -> None:
    loss = SwAV(0.2, 0.06)
    given = {"keys": KEYS, "key_prototypes": KEY_C, "bank": BANK}
    assert_same_loss_and_gradients(
        lambda z, c: loss(z, prototypes=c, **given),
        lambda z, c: swav(z, c, 0.2, 0.06, keys=KEYS, key_C=KEY_C, bank=BANK),
        views,
    )


def test_swav_with_queues_and_local_crops() -> None:
    """As it is trained: the student assigns its own global views, and the two local crops predict both."""
    loss = SwAV()
    assert_same_loss_and_gradients(
        lambda z, c: loss(z, prototypes=c, bank=BANK, global_views=2),
        lambda z, c: swav(z, c, 0.1, 0.05, bank=BANK, views=2),
    )


@pytest.mark.parametrize("views", [2, 4])
def test_dino_with_a_teacher(views) -> None:
    """With a center, and prototypes whose lengths are learned."""
    loss = small_dino(teacher_temperature=0.06)
    loss.center.copy_(0.1 * draw(K, seed=5))
    center, lengths = loss.center.double(), 1 + 0.3 * draw(K, 1, seed=6)
    assert_same_loss_and_gradients(
        lambda z, c: loss(z, prototypes=c * lengths, keys=KEYS, key_prototypes=KEY_C),
        lambda z, c: dino(z, c * lengths, 0.1, 0.06, center, KEYS, KEY_C),
        views,
    )


def test_dino_without_a_teacher_has_targets_from_the_global_views() -> None:
    assert_same_loss_and_gradients(
        lambda z, c: small_dino()(z, prototypes=c, global_views=2), lambda z, c: dino(z, c, 0.1, 0.04, views=2)
    )


def test_dino_with_sinkhorn_assigns_all_global_views_together() -> None:
    """DINOv2: epsilon is the teacher's temperature, and the images of both views are samples of one problem."""
    loss = small_dino(centering="sinkhorn", teacher_temperature=0.07)
    scores = normalize(KEYS, dim=-1).flatten(0, 1) @ KEY_C.T
    targets = sinkhorn(scores, 0.07, 3).view(2, B, K)
    assert_same_loss_and_gradients(
        lambda z, c: loss(z, prototypes=c, keys=KEYS, key_prototypes=KEY_C),
        lambda z, c: prediction(normalize(z, dim=-1), c, 0.1, list(targets)),
    )
    centered = small_dino(teacher_temperature=0.07)
    centered.center = -0.07 * sinkhorn_potentials(scores, epsilon=0.07)
    given = {"prototypes": C, "keys": KEYS, "key_prototypes": KEY_C}
    torch.testing.assert_close(centered(Z, **given), loss(Z, **given))


@pytest.mark.parametrize("make", [SwAV, small_dino])
def test_every_pair_of_views_counts_the_same(make) -> None:
    """A global view predicts one view and a local crop two, so a local crop's rows count twice as much."""
    loss = make()
    rows = loss.rows(Z, prototypes=C, keys=KEYS)
    links = [(v, w) for v in range(4) for w in range(2) if v != w]
    pairs = [loss(Z[v], keys=KEYS[w], prototypes=C) for v, w in links]
    torch.testing.assert_close(loss(Z, prototypes=C, keys=KEYS), mean(pairs))
    torch.testing.assert_close(rows.mean(), mean(pairs))
    assert rows.shape == (4, B)


@pytest.mark.parametrize("make", [SwAV, small_dino])
def test_a_matrix_that_is_too_large_to_store_is_computed_tile_by_tile(make, monkeypatch) -> None:
    given = {"keys": KEYS, "key_prototypes": KEY_C}
    leaves, found = (Z.clone().requires_grad_(), C.clone().requires_grad_()), []
    for largest in (B * K - 1, 2 * B * K):
        monkeypatch.setattr(prototype_objective, "STORED", largest)
        value = make()(leaves[0], prototypes=leaves[1], **given)
        found.append((value, *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(*found)


# What has no gradient, and what the keys are


@pytest.mark.parametrize("make", [SwAV, small_dino])
def test_without_keys_the_views_themselves_are_assigned_without_gradient(make) -> None:
    leaves = Z.clone().requires_grad_(), C.clone().requires_grad_()
    alone = make()(leaves[0], prototypes=leaves[1])
    with_keys = make()(leaves[0], prototypes=leaves[1], keys=Z, key_prototypes=C)
    torch.testing.assert_close(alone, with_keys)
    torch.testing.assert_close(torch.autograd.grad(alone, leaves), torch.autograd.grad(with_keys, leaves))


@pytest.mark.parametrize("make", [SwAV, small_dino])
def test_local_crops_are_not_assigned(make) -> None:
    """What the first view predicts doesn't depend on the local crops."""
    moved = torch.cat([Z[:2], draw(2, B, D, seed=9)])
    rows = [make().rows(z, prototypes=C, global_views=2)[:2] for z in (Z, moved)]
    torch.testing.assert_close(*rows)
    everyone = [make().rows(z, prototypes=C)[:2] for z in (Z, moved)]
    assert (everyone[0] - everyone[1]).abs().max() > 1e-3


def test_the_slope_of_a_similarity_is_prediction_minus_target() -> None:
    """dL/ds = (softmax(s/tau) - p)/tau, with s = z if the prototypes are the axes."""
    z = draw(2, B, K, seed=7).requires_grad_()
    keys, axes = draw(2, B, K, seed=8), torch.eye(K, dtype=torch.float64)
    loss = small_dino(temperature=0.3, teacher_temperature=0.2, normalize=False)
    slope = torch.autograd.grad(loss(z, prototypes=axes, keys=keys), z)[0]
    expected = torch.softmax(z / 0.3, -1) - torch.softmax(keys.flip(0) / 0.2, -1)
    torch.testing.assert_close(slope, expected.detach() / (0.3 * 2 * B))


# Queues


def test_a_queue_with_a_zero_row_does_not_count() -> None:
    """It is being filled. Each view's queue is judged by itself, and a full one is used."""
    loss, given = SwAV(), {"prototypes": C}
    plain, full = loss(Z[:2], **given), loss(Z[:2], bank=BANK, **given)
    assert (plain - full).abs() > 1e-3
    for row in (0, 4, 8):
        filling = BANK.clone()
        filling[:, row] = 0
        torch.testing.assert_close(loss(Z[:2], bank=filling, **given), plain)
    torch.testing.assert_close(loss(Z[:2], bank=torch.zeros_like(BANK), **given), plain)
    filling = BANK.clone()
    filling[0, 3] = 0
    first, second = loss.rows(Z[:2], bank=filling, **given)
    torch.testing.assert_close(second, loss.rows(Z[:2], **given)[1])  # predicts the first view, whose queue is filling
    torch.testing.assert_close(first, loss.rows(Z[:2], bank=BANK, **given)[0])
    negative = BANK.clone()
    negative[..., 0] = 0  # a zero in a row doesn't make it empty
    assert (loss(Z[:2], bank=negative, **given) - plain).abs() > 1e-3


def test_the_order_of_a_queue_does_not_matter() -> None:
    loss = SwAV()
    shuffled = BANK[:, torch.tensor([3, 8, 0, 1, 7, 2, 6, 5, 4])]
    torch.testing.assert_close(loss(Z[:2], prototypes=C, bank=shuffled), loss(Z[:2], prototypes=C, bank=BANK))


def test_there_is_one_queue_per_assigning_view() -> None:
    for views, queues in ((2, 3), (4, 2)):
        with pytest.raises(ValueError, match=rf"bank is .*: give \[{views},M,5\], one queue per view that assigns"):
            SwAV()(Z[:views], prototypes=C, bank=BANK[:1].expand(queues, 9, D))
    with pytest.raises(ValueError, match=r"bank is .*: give \[W,M,D\], one queue per global view"):
        SwAV()(Z[:2], prototypes=C, bank=BANK[0])


# Collapse


def test_swav_of_constant_projections_is_stuck_at_log_k() -> None:
    """Their assignments are uniform, so nothing pulls them apart; with 3000 prototypes the loss is 8.006."""
    constant = one_hot(torch.zeros(2, 8, dtype=torch.int64), 9).double()
    prototypes = one_hot(torch.arange(3000) % 8 + 1, 9).double().requires_grad_()  # all orthogonal to the projections
    loss = SwAV()
    value = loss(constant, prototypes=prototypes)
    assert value.item() == pytest.approx(math.log(3000)) == pytest.approx(8.006, abs=5e-4)
    entropies = loss.entropies(constant, prototypes=prototypes)
    assert entropies["entropy"].item() == pytest.approx(math.log(3000))
    assert entropies["kl"].item() == pytest.approx(0.0, abs=1e-9)
    assert torch.autograd.grad(value, prototypes)[0].abs().max() < 1e-9


@pytest.mark.parametrize("make", [SwAV, small_dino])
@pytest.mark.parametrize("views", [2, 4])
def test_the_loss_is_the_divergence_plus_the_entropy(make, views) -> None:
    """CE(p, q) = KL(p||q) + H(p), so the loss is at least the entropy of the assignments."""
    loss, given = make(), {"prototypes": C, "keys": KEYS, "key_prototypes": KEY_C}
    found = loss.entropies(Z[:views], **given)
    torch.testing.assert_close(found["kl"] + found["entropy"], loss(Z[:views], **given))
    keys = normalize(KEYS, dim=-1)
    if make is SwAV:
        p = torch.stack([sinkhorn(k @ KEY_C.T, 0.05, 3) for k in keys])
    else:
        p = torch.softmax(keys @ KEY_C.T / 0.04, -1)
    log_q = log_softmax(normalize(Z[:views], dim=-1) @ C.T / 0.1, -1)
    links = [(v, w) for v in range(views) for w in range(2) if v != w]
    divergence = mean([(p[w] * (p[w].log() - log_q[v])).sum(-1).mean() for v, w in links])
    torch.testing.assert_close(found["kl"], divergence)
    assert found["kl"] > 0
    used = p.mean((0, 1))
    torch.testing.assert_close(found["usage"], -(used * used.log()).sum())


def test_both_collapses_of_dino_have_no_divergence_and_different_entropies() -> None:
    """Sharpening alone ends in one prototype, centering alone in the uniform assignment; in between it can learn."""
    axes = torch.eye(K, dtype=torch.float64)
    one = axes[:1].expand(2, B, K)
    loss = small_dino(temperature=0.04)
    sharp = loss.entropies(one, prototypes=axes)
    assert max(sharp["kl"], sharp["entropy"], sharp["usage"]) < 1e-6
    loss.center.copy_(axes[0])  # that of projections that were always the same
    flat = loss.entropies(one, prototypes=axes)
    assert flat["entropy"].item() == pytest.approx(math.log(K)) == pytest.approx(flat["usage"].item())
    spread = small_dino().entropies(axes.expand(2, K, K), prototypes=axes)
    assert spread["entropy"] < 1e-6 and spread["usage"].item() == pytest.approx(math.log(K))


def test_unit_prototypes_keep_the_student_from_being_certain() -> None:
    """With 65,536 prototypes, one similarity of 1 and the others 0 give a probability of a quarter."""
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat_interleave(torch.tensor([1, 65535]), dim=0)
    z = torch.tensor([1.0, 0.0]).expand(2, 2, 2)
    certain = math.exp(10) / (math.exp(10) + 65535)
    assert certain == pytest.approx(0.25, abs=2e-3)
    assert DINO(teacher_temperature=0.02)(z, prototypes=prototypes).item() == pytest.approx(
        -math.log(certain), rel=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sharp_assignments_of_half_precision_projections_are_finite(dtype) -> None:
    z, prototypes = draw(4, 64, 32).to(dtype).requires_grad_(), unit(300, 32, seed=1).float().requires_grad_()
    bank = unit(2, 100, 32, seed=2).to(dtype)
    for loss in (SwAV(epsilon=0.03), SwAV(epsilon=0.001), DINO(300, teacher_temperature=0.001)):
        value = loss(z, prototypes=prototypes, global_views=2, **({"bank": bank} if loss.takes_bank else {}))
        slopes = torch.autograd.grad(value, (z, prototypes))
        assert value.isfinite() and all(slope.isfinite().all() for slope in slopes)
        assert [slope.dtype for slope in slopes] == [dtype, torch.float32]


# The center


def train(loss: DINO, step: int, **given) -> Tensor:
    z = draw(2, B, D, seed=100 + step).requires_grad_()
    value = loss(z, prototypes=C, keys=teacher_rows(step), key_prototypes=KEY_C, **given)
    value.backward()
    return value.detach()


def teacher_rows(step: int) -> Tensor:
    return draw(2, B, D, seed=200 + step)


def test_the_center_is_a_running_mean_that_changes_after_its_use() -> None:
    """c_t = 0.1 sum_i 0.9^(t-i) b_i. Before the first backward pass it is 0; after ten it has .65 of its value."""
    loss, center = small_dino(), torch.zeros(K, dtype=torch.float64)
    for step in range(10):
        z = draw(2, B, D, seed=100 + step)
        expected = dino(z, C, 0.1, 0.04, center, teacher_rows(step), KEY_C)
        torch.testing.assert_close(train(loss, step), expected, rtol=1e-5, atol=1e-6)
        rows = [t @ KEY_C.T for view in normalize(teacher_rows(step), dim=-1) for t in view]
        center = 0.9 * center + 0.1 * torch.stack(rows).mean(0)
        torch.testing.assert_close(loss.center.double(), center, rtol=1e-5, atol=1e-6)
    constant = small_dino()
    for _ in range(10):
        train(constant, 0)
    rows = normalize(teacher_rows(0), dim=-1).flatten(0, 1) @ KEY_C.T
    torch.testing.assert_close(constant.center.double(), (1 - 0.9**10) * rows.mean(0), rtol=1e-5, atol=1e-6)


def test_evaluation_leaves_the_center_and_a_checkpoint_has_it() -> None:
    loss, z = small_dino(), Z.clone().requires_grad_()
    for call in (loss, loss.terms, loss.rows, loss.entropies):
        call(z, prototypes=C)
    assert not loss.center.any()
    train(loss, 0)
    assert loss.center.any()
    resumed = small_dino()
    resumed.load_state_dict(copy.deepcopy(loss.state_dict()))
    assert list(loss.state_dict()) == ["center"]
    assert train(resumed, 1) == train(loss, 1) and torch.equal(resumed.center, loss.center)


def test_the_center_is_that_of_global_views_and_of_the_center_alone() -> None:
    loss = small_dino(center_momentum=0.0)
    loss(Z.clone().requires_grad_(), prototypes=C, global_views=2).backward()
    expected = (normalize(Z[:2], dim=-1).flatten(0, 1) @ C.T).mean(0)
    torch.testing.assert_close(loss.center.double(), expected, rtol=1e-5, atol=1e-6)
    sinkhorn_loss = small_dino(centering="sinkhorn")
    train(sinkhorn_loss, 0)
    assert not sinkhorn_loss.center.any()


def test_shifting_the_logits_and_the_center_together_changes_nothing() -> None:
    """A further feature that is 1 for each key adds a number per prototype to its logits."""
    shift = draw(K, seed=11)
    plain, shifted = small_dino(normalize=False), small_dino(normalize=False)
    shifted.center.copy_(shift)
    keys, key_c = normalize(KEYS, dim=-1), KEY_C
    more_keys, more_c = torch.cat([keys, torch.ones(2, B, 1)], -1), torch.cat([key_c, shifted.center[:, None]], -1)
    more_z, more_own = torch.cat([Z, torch.zeros(4, B, 1)], -1), torch.cat([C, torch.zeros(K, 1)], -1)
    torch.testing.assert_close(
        shifted(more_z, prototypes=more_own, keys=more_keys, key_prototypes=more_c),
        plain(Z, prototypes=C, keys=keys, key_prototypes=key_c),
    )


# Arguments and prototypes


def test_the_teachers_temperature_may_change_during_training() -> None:
    """A captured graph reads it from one tensor, which a schedule overwrites."""
    loss = small_dino(teacher_temperature=0.04)
    present = on_device(loss, "teacher_temperature")
    loss.teacher_temperature = 0.07
    assert present == 0.07 == loss.teacher_temperature
    given = {"prototypes": C, "keys": KEYS}
    torch.testing.assert_close(loss(Z, **given), small_dino(teacher_temperature=0.07)(Z, **given))
    torch.testing.assert_close(loss.bfloat16()(Z, **given), small_dino(teacher_temperature=0.07)(Z, **given))
    for bad in (0.0, -1.0, math.nan, "0.1"):
        with pytest.raises(ValueError, match="teacher_temperature is "):
            loss.teacher_temperature = bad


def test_numbers_that_make_no_sense_are_refused() -> None:
    for arguments in ({"iterations": 0}, {"iterations": 2.5}, {"epsilon": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))} is "):
            SwAV(**arguments)
    for arguments in ({"prototypes": 0}, {"center_momentum": 1.0}, {"centering": "none"}):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))} is "):
            DINO(**arguments)
    with pytest.raises(ValueError, match=r"prototypes is .*: give \[65536,5\]"):
        DINO()(Z, prototypes=C)
    with pytest.raises(ValueError, match="needs prototypes=: "):
        SwAV()(Z)


@pytest.mark.parametrize(("loss", "kind"), [(SwAV(), "unit"), (DINO(K), "weight-norm")])
def test_prototypes_are_learned(loss, kind) -> None:
    """A few steps on prototypes and projections together lower the loss on fixed keys."""
    torch.manual_seed(0)
    prototypes, z = Prototypes(K, D, kind), Z.float().clone().requires_grad_()
    optimizer = torch.optim.SGD([z, *prototypes.parameters()], lr=0.5)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        value = loss(z, prototypes=prototypes(), keys=KEYS.float(), key_prototypes=KEY_C.float())
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.5
    assert prototypes.weight.grad is not None and prototypes.weight.grad.abs().max() > 0
