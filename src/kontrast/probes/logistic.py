"""Multinomial logistic regression by L-BFGS, with an explicit gradient.

N rows, F width, C classes; W [F,C], b [C]. The loss is scikit-learn's divided by N:

    f(W, b) = mean_i -log softmax(x_i W + b)[y_i] + |W|^2 / (2 C N)          C the inverse regularization strength
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from kontrast.errors import UsageError
from kontrast.probes.result import ProbeResult, check_features, predictions, result

GRID = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
LARGEST_SELECTION = 10_000
LARGEST_PRECONDITIONER = 4_096
MEMORY = 10
FEWEST_TO_SELECT, PLAIN = 500, (1.0,)
"""With fewer rows C is 1: a held-out fifth of 20 labels chose C = 0.001, 10 points worse."""


@dataclass(frozen=True)
class Fit:
    """Fitted weights [F,C] and intercept [C], the number of iterations and the last estimate of f - min f."""

    weight: Tensor
    bias: Tensor
    iterations: int
    gap: float

    def scores(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias

    def predict(self, x: Tensor) -> Tensor:
        return self.scores(x).argmax(1)


class Problem:
    """The loss of one data set: its value and gradient at (W, b) stacked as [F+1,C], and a preconditioner."""

    def __init__(self, x: Tensor, y: Tensor, classes: int):
        self.x, self.y, self.classes = x, y, classes
        # For two classes scikit-learn penalizes one vector w = w1 - w0, which is the same as twice the penalty on both.
        self.penalty = (2.0 if classes == 2 else 1.0) / len(x)
        self.mean = x.mean(0)
        self.covariance = None
        if x.shape[1] <= LARGEST_PRECONDITIONER:
            sample = x[:: max(1, len(x) // LARGEST_SELECTION)] - self.mean
            self.covariance = sample.T @ sample / len(sample)

    def value_and_gradient(self, theta: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        weight, bias = theta[:-1], theta[-1]
        log_p = torch.addmm(bias, self.x, weight).log_softmax(1)
        chosen = log_p.gather(1, self.y[:, None])
        decay = self.penalty / strength
        value = -chosen.mean(dtype=torch.float64) + 0.5 * decay * weight.double().square().sum()
        residual = log_p.exp_().scatter_add_(1, self.y[:, None], torch.full_like(chosen, -1.0)).div_(len(self.x))
        # x.T @ residual is the same product but ten times slower on a CPU (measured at 50,000 x 512, 10 classes).
        slopes = (residual.T @ self.x).T
        gradient = torch.cat([slopes + decay * weight, residual.sum(0, keepdim=True)])
        return value, gradient

    def preconditioner(self, strength: float):
        """Return the solve by Boehning's bound: the Hessian is at most (covariance / 2 + decay) for every class.

        It makes the ill-conditioned features of a network an easy problem.
        """
        decay = self.penalty / strength
        if self.covariance is None:
            return lambda g: g / (0.5 + decay)
        factor = cholesky_factor(0.5 * self.covariance, decay)

        def solve(g: Tensor) -> Tensor:
            w = torch.cholesky_solve(g[:-1] - self.mean[:, None] * g[-1:], factor)
            return torch.cat([w, 2 * g[-1:] - (self.mean @ w)[None]])

        return solve


def cholesky_factor(matrix: Tensor, shift: float) -> Tensor:
    """Factor the matrix with `shift` added to its diagonal, and more if rounding requires it: a collapsed encoder's
    features have one large eigenvalue, and its rounding error can make the others negative."""
    mean, identity = matrix.diagonal().mean(), torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    for more in (1e-6, 1e-5, 1e-4, 1e-3):
        factor, failed = torch.linalg.cholesky_ex(matrix + (shift + more * mean) * identity)
        if not failed:
            return factor
    return torch.linalg.cholesky(matrix + (shift + mean) * identity)


def lbfgs_direction(gradient: Tensor, history: deque, solve) -> Tensor:
    """Return the L-BFGS direction: the preconditioner improved by the last steps s and gradient changes y."""
    q, alphas = gradient.clone(), []
    for s, y, rho in reversed(history):
        alphas.append(rho * (s * q).sum())
        q -= alphas[-1] * y
    if history:
        s, y, _ = history[-1]
        q = solve(q) * ((s * y).sum() / (y * solve(y)).sum())
    else:
        q = solve(q)
    for (s, y, rho), alpha in zip(history, reversed(alphas)):
        q += s * (alpha - rho * (y * q).sum())
    return -q


@torch.inference_mode()
def fit_logistic(
    x: Tensor,
    y: Tensor,
    classes: int,
    strength: float = 1.0,
    *,
    start: Tensor | None = None,
    tolerance: float | None = None,
    iterations: int = 500,
    problem: Problem | None = None,
) -> Fit:
    """Minimize f until the estimated gap f - min f (half the preconditioned squared gradient) is below the tolerance,
    or until no step lowers f any more, which is the limit of the dtype's precision.

    Args:
        x: features [N,F].
        y: integers [N].
        classes: number of classes.
        strength: C, the inverse regularization strength.
        start: initial (W, b) stacked as [F+1,C]. Default: zeros.
        tolerance: gap at which to stop. Default: 1e-15 in float64, else 1e-9.
        iterations: the most iterations.
        problem: the loss of (x, y), if it was already built.
    """
    problem = problem or Problem(x, y, classes)
    tolerance = tolerance or (1e-15 if x.dtype == torch.float64 else 1e-9)
    solve = problem.preconditioner(strength)
    theta = x.new_zeros(x.shape[1] + 1, classes) if start is None else start.clone()
    value, gradient = problem.value_and_gradient(theta, strength)
    history: deque = deque(maxlen=MEMORY)
    taken = 0
    while (gap := 0.5 * float((gradient * solve(gradient)).sum())) > tolerance and taken < iterations:
        direction = lbfgs_direction(gradient, history, solve)
        slope = float((gradient * direction).sum())
        step = 1.0
        while step > 1e-4:
            trial = theta + step * direction
            new_value, new_gradient = problem.value_and_gradient(trial, strength)
            if new_value <= value + 1e-4 * step * slope:
                break
            step *= 0.5
        else:
            break
        s, change = trial - theta, new_gradient - gradient
        curvature = float((s * change).sum())
        if curvature > 0:
            history.append((s, change, 1 / curvature))
        theta, value, gradient, taken = trial, new_value, new_gradient, taken + 1
    return Fit(theta[:-1], theta[-1], taken, gap)


def column_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each column; the deviation of a constant column is 1."""
    mean, deviation = x.mean(0), x.std(0, correction=0)
    return mean, torch.where(deviation > 1e-6 * deviation.max(), deviation, 1.0)


def standardize(train: Tensor, *others: Tensor) -> list[Tensor]:
    """Scale columns to zero mean and unit variance by train's statistics; a constant column becomes zero."""
    mean, deviation = column_scales(train)
    return [(x - mean) / deviation for x in (train, *others)]


def span_basis(train: Tensor) -> Tensor | None:
    """Return a basis of train's span [F,N] if there are far more dimensions than rows. The fit in it is the same,
    because the penalty removes any part of the weights outside the span."""
    return None if 2 * len(train) > train.shape[1] else torch.linalg.qr(train.T).Q


def project_to_span(train: Tensor, *others: Tensor) -> list[Tensor]:
    """Reduce the dimensions to those of train's span, if that makes the problem smaller."""
    basis = span_basis(train)
    return [x if basis is None else x @ basis for x in (train, *others)]


def held_out_scores(x: Tensor, y: Tensor, classes: int, grid: tuple[float, ...], seed: int) -> dict[float, float]:
    """Return the accuracy of each strength on a held-out fifth of at most 10,000 train rows."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:LARGEST_SELECTION].to(x.device)
    held_out, fitted = order[: max(1, len(order) // 5)], order[max(1, len(order) // 5) :]
    problem, theta, scores = Problem(x[fitted], y[fitted], classes), None, {}
    for strength in sorted(grid):
        fit = fit_logistic(x[fitted], y[fitted], classes, strength, start=theta, tolerance=1e-6, problem=problem)
        theta = torch.cat([fit.weight, fit.bias[None]])
        scores[strength] = float((fit.predict(x[held_out]) == y[held_out]).double().mean())
    return scores


def select_and_fit(x: Tensor, y: Tensor, classes: int, grid: tuple[float, ...] | None, seed: int) -> tuple[Fit, dict]:
    """Choose C on a held-out fifth, fit all rows, and return the fit and what to report about it."""
    grid = tuple(grid or (PLAIN if len(x) < FEWEST_TO_SELECT else GRID))
    scores = held_out_scores(x, y, classes, grid, seed) if len(grid) > 1 else {grid[0]: None}
    best = max(sorted(scores), key=lambda c: scores[c] or 0.0)
    fit = fit_logistic(x, y, classes, best)
    return fit, {"C": best, "grid": list(grid), "held_out": scores[best], "iterations": fit.iterations}


def linear_layer(
    features: Tensor, labels: Tensor, *, grid: tuple[float, ...] | None = None, seed: int = 0
) -> tuple[torch.nn.Linear, dict]:
    """Fit the logistic regression of `logistic`, and return it as a linear layer that takes the features as they are.

    Args:
        features: train features [N,F].
        labels: integers [N], all of 0 to C-1.
        grid: inverse regularization strengths C to choose from; default: 0.001 to 10, or 1 for fewer than 500 rows.
        seed: seed of the held-out rows.

    Returns:
        The layer, whose softmax gives the probabilities of the classes, and the protocol.

    Example:
        >>> y = torch.arange(40) % 2
        >>> layer, protocol = linear_layer(torch.eye(2)[y], y)
        >>> layer(torch.eye(2)).argmax(1)
        tensor([0, 1])
    """
    features, labels = features.float(), labels.to(features.device)
    classes, (mean, deviation) = int(labels.max()) + 1, column_scales(features)
    x = (features - mean) / deviation
    basis = span_basis(x)
    fit, protocol = select_and_fit(x if basis is None else x @ basis, labels, classes, grid, seed)
    # The layer undoes the scaling, in float64: features with a large common offset cancel.
    weight = (fit.weight if basis is None else basis @ fit.weight).double() / deviation.double()[:, None]
    layer = torch.nn.Linear(len(weight), classes, device=features.device)
    with torch.no_grad():
        layer.weight.copy_(weight.T)
        layer.bias.copy_(fit.bias.double() - mean.double() @ weight)
    return layer, protocol


@torch.inference_mode()
def logistic(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    grid: tuple[float, ...] | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Fit logistic regression on standardized features: the quick linear probe.

    With 500 train rows or more, C is chosen on a held-out fifth of them; then all are fitted. The strongest
    regularization wins a tie.

    Args:
        train: train features [N,F].
        train_labels: integers [N].
        test: test features [T,F].
        test_labels: integers [T].
        grid: inverse regularization strengths C to choose from; default: 0.001 to 10, or 1 for fewer than 500 rows.
        seed: seed of the held-out rows and of the bootstrap interval.

    Example:
        >>> y = torch.arange(40) % 2
        >>> logistic(torch.eye(2)[y], y, torch.eye(2)[y], y).accuracy
        1.0
    """
    if grid is not None and (not grid or min(grid) <= 0):
        raise UsageError(f"grid = {grid}: give positive inverse strengths")
    train, train_labels, test, test_labels, _ = check_features(train, train_labels, test, test_labels)
    # As in scikit-learn, only the classes that are present count, and two of them are the binary problem.
    present, y = torch.unique(train_labels, return_inverse=True)
    test_labels, classes = torch.searchsorted(present, test_labels), len(present)
    dtype = torch.promote_types(train.dtype, torch.float32)
    train, test = project_to_span(*standardize(train.to(dtype), test.to(dtype)))
    fit, protocol = select_and_fit(train, y, classes, grid, seed)
    found = predictions(fit.scores(test), test_labels)
    return result("logistic", found._replace(labels=present[test_labels]), protocol, seed)
