"""Sinkhorn's assignments: the log form against the product form, samples that don't count, samples of several ranks."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.kernels.sinkhorn import sinkhorn_potentials

from support.objective_definitions import sinkhorn


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosines(N: int = 12, K: int = 7, D: int = 5, seed: int = 0) -> Tensor:
    return normalize(draw(N, D, seed=seed), dim=-1) @ normalize(draw(K, D, seed=seed + 1), dim=-1).T


def assign(scores: Tensor, epsilon: float = 0.05, iterations: int = 3, **more) -> Tensor:
    """Return the assignment of each sample: [N,K]."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    bias = sinkhorn_potentials(scores, epsilon=epsilon, iterations=iterations, **more)
    return torch.softmax(wide / epsilon + bias.unsqueeze(-2), dim=-1)


@pytest.mark.parametrize("epsilon", [0.03, 0.05, 0.5])
@pytest.mark.parametrize("iterations", [1, 3, 50])
def test_the_log_form_is_the_sinkhorn(epsilon, iterations) -> None:
    for N, K in ((12, 7), (5, 20), (1, 3)):
        scores = cosines(N, K)
        q = assign(scores, epsilon, iterations)
        torch.testing.assert_close(q, sinkhorn(scores, epsilon, iterations))
        torch.testing.assert_close(q.sum(-1), torch.ones(N, dtype=torch.float64))


def test_many_iterations_use_all_prototypes_alike_and_three_do_not() -> None:
    scores = cosines(60, 6)
    shares = [6 * assign(scores, 0.05, n).mean(0) for n in (3, 2000)]
    assert (shares[0] - 1).abs().max() > 0.01
    torch.testing.assert_close(shares[1], torch.ones(6, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epsilon", [0.05, 0.03, 0.01, 0.001])
def test_sharp_assignments_of_half_precision_are_finite(epsilon, dtype) -> None:
    """exp(1/0.03) is infinite in float16, and exp(1/0.01) in float32; the sums are those of the rounded scores."""
    scores = torch.cat([cosines(64, 30), torch.eye(64, 30, dtype=torch.float64), -torch.ones(3, 30)]).to(dtype)
    q = assign(scores, epsilon)
    assert q.dtype == torch.float32 and bool(q.isfinite().all())
    if epsilon >= 0.03:
        torch.testing.assert_close(q.double(), sinkhorn(scores, epsilon, 3), rtol=2e-3, atol=1e-5)


def test_identical_samples_are_assigned_uniformly() -> None:
    """Why a collapsed SwAV is stuck at log K."""
    q = assign(cosines(1, 9).expand(8, 9))
    torch.testing.assert_close(q, torch.full((8, 9), 1 / 9, dtype=torch.float64))


def test_shifts_of_the_scores() -> None:
    """A number per prototype, added to all samples, changes nothing. One per sample does, unless the sums converge."""
    scores, by_prototype, by_sample = cosines(), 0.3 * draw(7, seed=5), 0.3 * draw(12, 1, seed=6)
    torch.testing.assert_close(assign(scores + by_prototype), assign(scores))
    assert (assign(scores + by_sample) - assign(scores)).abs().max() > 1e-3
    torch.testing.assert_close(assign(scores + by_sample, 0.5, 500), assign(scores, 0.5, 500))


def test_samples_that_do_not_count_change_nothing() -> None:
    scores, more = cosines(), cosines(4, seed=9)
    counts = torch.arange(16) < 12
    both = torch.cat([scores, more])
    torch.testing.assert_close(assign(both, counts=counts)[:12], assign(scores))
    assert (assign(both)[:12] - assign(scores)).abs().max() > 1e-3
    zero = torch.cat([scores, torch.zeros(4, 7, dtype=torch.float64)])  # rows of a queue that is not yet filled
    assert (assign(zero)[:12] - assign(scores)).abs().max() > 0.01


def test_leading_dimensions_are_separate_problems() -> None:
    views = torch.stack([cosines(), cosines(seed=3)])
    counts = torch.stack([torch.arange(12) < 12, torch.arange(12) < 9])
    together = assign(views, counts=counts)
    for view, count, found in zip(views, counts, together):
        torch.testing.assert_close(found, assign(view, counts=count))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_samples_of_all_ranks_are_assigned_together(ranks, dtype) -> None:
    """Ranks are threads here, which exchange one row of sums per iteration; tests/test_distributed.py has processes."""
    scores, parts = cosines(12).to(dtype), torch.arange(12).chunk(ranks)
    meeting, sent = threading.Barrier(ranks), [[] for _ in range(ranks)]
    found: list = [None] * ranks

    def run(rank: int) -> None:
        def gather(row: Tensor) -> Tensor:
            assert row.shape == (1, 7)
            sent[rank].append(row)
            meeting.wait(600)
            return torch.cat([rows[len(sent[rank]) - 1] for rows in sent])

        found[rank] = assign(scores[parts[rank]], 0.03, gather=gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(rows) for rows in sent] == [3] * ranks
    expected = sinkhorn(scores, 0.03, 3)
    tolerance = {} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(found).double(), expected, **tolerance)


def test_there_is_no_gradient_and_wrong_scores_are_refused() -> None:
    assert not sinkhorn_potentials(cosines().requires_grad_(), epsilon=0.05).requires_grad
    for bad in (torch.ones(3), torch.ones(3, 2, dtype=torch.int64), [[1.0]]):
        with pytest.raises(ValueError, match="scores is "):
            sinkhorn_potentials(bad, epsilon=0.05)
