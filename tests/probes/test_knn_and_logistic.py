"""kNN and logistic regression against float64 definitions and scikit-learn, to the digit."""

from __future__ import annotations

import importlib
from functools import partial

import numpy
import pytest
import torch
from torch.nn.functional import normalize

from kontrast.errors import DataError, UsageError
from kontrast.probes import few_shot, knn, logistic, nearest_rows
from kontrast.probes.logistic import GRID, Problem, fit_logistic, project_to_span, standardize
from kontrast.probes.result import predictions


def features(n: int = 400, width: int = 24, classes: int = 5, noise: float = 1.6, seed: int = 0):
    """Ill-conditioned, non-negative features of overlapping classes, as a network makes them: train and test."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=g) * torch.logspace(0, -2, width)[:, None]
    means = torch.randn(classes, width, generator=g)
    y = torch.randint(classes, (n + n // 2,), generator=g)
    x = ((means[y] + noise * torch.randn(len(y), width, generator=g)) @ mixing).relu() + 0.1
    return x[:n], y[:n], x[n:], y[n:]


def test_knn_equals_the_definition_in_float64():
    train, y, test, labels = features()
    k, temperature = 20, 0.1
    s = normalize(test.double(), dim=1) @ normalize(train.double(), dim=1).T
    hits = 0
    for i in range(len(test)):
        order = sorted(range(len(train)), key=lambda j: -s[i, j])[:k]
        votes = [0.0] * 5
        for j in order:
            votes[int(y[j])] += float((s[i, j] / temperature).exp())
        hits += int(numpy.argmax(votes)) == int(labels[i])
    found = knn(train, y, test, labels, k=k, temperature=temperature)
    assert found.accuracy == hits / len(test) and found.n == len(test)


@pytest.mark.parametrize("probe", [knn, logistic])
def test_a_result_has_one_boolean_per_test_image(probe):
    """Labels 0 and 2 without 1 are the binary problem, as in scikit-learn."""
    train, y, test, labels = features(classes=2)
    found = probe(train, 2 * y, test, 2 * labels)
    assert found.correct.shape == (len(test),) and found.correct.double().mean().item() == found.accuracy
    assert found.correct.tolist() == probe(train, y, test, labels).correct.tolist()
    assert "correct" not in found.to_dict()


def test_knn_equals_scikit_learn():
    neighbors = pytest.importorskip("sklearn.neighbors", reason="scikit-learn is not installed")
    train, y, test, labels = features(noise=1.2)
    model = neighbors.KNeighborsClassifier(
        n_neighbors=15, algorithm="brute", weights=lambda d: numpy.exp((1 - d**2 / 2) / 0.2)
    )
    a, b = normalize(train.double(), dim=1), normalize(test.double(), dim=1)
    score = model.fit(a.numpy(), y.numpy()).score(b.numpy(), labels.numpy())
    assert knn(train.double(), y, test.double(), labels, k=15, temperature=0.2).accuracy == score


def test_chunks_do_not_change_the_nearest_rows():
    g = torch.Generator().manual_seed(1)
    q, rows = torch.randn(70, 8, generator=g), torch.randn(333, 8, generator=g)
    best, where = (q @ rows.T).topk(9, dim=1)
    s, j = nearest_rows(q, rows, 9, query_chunk=13, row_chunk=7)
    torch.testing.assert_close(s, best)
    assert torch.equal(j, where)


def test_knn_with_a_tiny_temperature_and_with_identical_images():
    train, y, test, labels = features(n=60)
    nearest = knn(train, y, test, labels, k=20, temperature=1e-4)
    assert nearest.accuracy == knn(train, y, test, labels, k=1).accuracy
    same = torch.ones(40, 8)
    found = knn(same, torch.arange(40) % 2, same, torch.arange(40) % 2, k=5)
    assert 0 <= found.accuracy <= 1


def test_a_k_above_the_number_of_images_is_lowered_and_noted():
    train, y, test, labels = features(n=60)
    found = knn(train, y, test, labels, k=200)
    assert found.protocol["k"] == 59 and "200" in found.note and "59" in found.note
    assert found.accuracy == knn(train, y, test, labels, k=59).accuracy
    assert knn(train, y, test, labels, k=60).note == ""


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_logistic_equals_scikit_learn(classes, strength):
    linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    train, y, test, labels = features(classes=classes, noise=2.5)
    x, x_test = standardize(train.double(), test.double())
    fit = fit_logistic(x, y, classes, strength)
    model = linear_model.LogisticRegression(C=strength, max_iter=20_000, tol=1e-12).fit(x.numpy(), y.numpy())
    weight, bias = fit.weight, fit.bias - fit.bias.mean()
    if classes == 2:
        weight, bias = weight[:, 1:] - weight[:, :1], (fit.bias[1] - fit.bias[0])[None]
    torch.testing.assert_close(weight.T, torch.tensor(model.coef_), rtol=1e-4, atol=1e-4)
    centered = torch.tensor(model.intercept_) - (0 if classes == 2 else float(model.intercept_.mean()))
    torch.testing.assert_close(bias, centered, rtol=1e-4, atol=1e-4)
    assert torch.equal(fit.predict(x_test), torch.tensor(model.predict(x_test.numpy())))
    single = fit_logistic(x.float(), y, classes, strength)
    assert float((single.predict(x_test.float()) == labels).double().mean()) == model.score(
        x_test.numpy(), labels.numpy()
    )


def test_the_gradient_is_the_derivative():
    train, y, *_ = features(n=50)
    problem = Problem(train.double(), y, 5)
    theta = torch.randn(25, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, gradient = problem.value_and_gradient(theta, 0.5)
    h = 1e-6
    for place in ((0, 0), (7, 3), (24, 2)):
        shift = torch.zeros_like(theta)
        shift[place] = h
        up, down = (problem.value_and_gradient(theta + s, 0.5)[0] for s in (shift, -shift))
        assert float((up - down) / (2 * h)) == pytest.approx(float(gradient[place]), rel=1e-4, abs=1e-8)


def test_wide_features_have_the_same_fit_without_a_preconditioner(monkeypatch):
    module = importlib.import_module("kontrast.probes.logistic")  # the package's attribute of this name is the function
    train, y, *_ = features(n=120)
    (x,) = standardize(train.double())
    full = fit_logistic(x, y, 5, 1.0)
    monkeypatch.setattr(module, "LARGEST_PRECONDITIONER", 8)
    plain = fit_logistic(x, y, 5, 1.0, iterations=5000)
    torch.testing.assert_close(plain.weight, full.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_fit_of_few_rows_is_the_same_in_the_span(classes):
    """Rows outside the span get the same scores too; with more rows nothing is projected."""
    x = torch.randn(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = torch.randn(9, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(20) % classes
    small, seen = project_to_span(x, other)
    assert small.shape == (20, 20)
    whole, within = fit_logistic(x, y, classes, 0.3), fit_logistic(small, y, classes, 0.3)
    torch.testing.assert_close(seen @ within.weight + within.bias, other @ whole.weight + whole.bias, rtol=0, atol=1e-6)
    assert project_to_span(x[:, :39])[0].shape == (20, 39)


def test_strength_is_chosen_by_held_out_accuracy():
    """With as many noise columns as images, weak regularization fits the noise, which held-out rows show."""
    g = torch.Generator().manual_seed(3)
    y = torch.randint(2, (300,), generator=g)
    x = torch.cat([y[:, None] * 2.0 + torch.randn(300, 1, generator=g), torch.randn(300, 250, generator=g)], 1)
    found = logistic(x[:200], y[:200], x[200:], y[200:], grid=GRID)
    weakest = logistic(x[:200], y[:200], x[200:], y[200:], grid=(1e6,))
    assert found.protocol["C"] <= 0.1 and found.accuracy > weakest.accuracy


def test_constant_columns_and_scale_do_not_matter():
    train, y, test, labels = features()
    plain = logistic(train, y, test, labels)
    wide = [torch.cat([1e4 * x + 7, torch.full((len(x), 2), 3.0)], 1) for x in (train, test)]
    assert abs(logistic(wide[0], y, wide[1], labels).accuracy - plain.accuracy) <= 2 / len(test)


def test_labels_may_have_gaps():
    train, y, test, labels = features(classes=3)
    assert logistic(train, 4 * y, test, 4 * labels).accuracy == pytest.approx(
        logistic(train, y, test, labels).accuracy, abs=0.02
    )
    assert knn(train, 4 * y, test, 4 * labels, k=9).accuracy == knn(train, y, test, labels, k=9).accuracy


@pytest.mark.parametrize("probe", [knn, logistic])
@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda a: a[0].__setitem__((3, 1), float("nan")), "train .*row 3"),
        (lambda a: a[2].__setitem__((5, 0), float("inf")), "test .*row 5"),
        (lambda a: a[1].zero_(), "60 train images .*label 0"),
        (lambda a: a[3].__setitem__(0, 99), r"\[99\]"),
        (lambda a: a.__setitem__(1, a[1][:-1]), r"60 train images .*\[59\]"),
        (lambda a: a.__setitem__(2, a[2][:, :-1]), "24 .*23"),
        (lambda a: a[1].__setitem__(0, -1), "train .*-1"),
        (lambda a: a.__setitem__(2, a[2][:0]), "test"),
        (lambda a: a.__setitem__(1, a[1].float()), "train .*labels.*float32"),
    ],
)
def test_bad_input_is_an_error_with_its_place(probe, change, hint):
    arguments = [t.clone() for t in features(n=60)]
    change(arguments)
    with pytest.raises(DataError, match=hint) as caught:
        probe(*arguments)
    assert caught.value.exit_code == 3


def test_bad_settings_are_usage_errors():
    data = features(n=60)
    for call in (lambda: knn(*data, k=0), lambda: knn(*data, temperature=0.0), lambda: logistic(*data, grid=(-1.0,))):
        with pytest.raises(UsageError):
            call()


def test_the_values_of_the_labels_do_not_matter():
    """Two classes are the binary problem for any two label values, as in scikit-learn."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.arange(60) % 2
    x[:, 0] += y
    found = [logistic(x, y + first, x, y + first, grid=(0.01, 1.0)) for first in (0, 1, 7)]
    assert len({(r.accuracy, r.protocol["iterations"], r.protocol["C"]) for r in found}) == 1


def test_features_of_two_dtypes_are_compared_in_the_wider_one():
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    assert knn(x, y, x.double(), y, k=3).accuracy == knn(x.double(), y, x.double(), y, k=3).accuracy


def test_features_of_a_collapsed_encoder():
    """One direction has nearly all the variance: in float32 the covariance has no Cholesky factor."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (20_000,), generator=generator)
    along = y[:, None] + torch.randn(len(y), 1, generator=generator)
    x = along * torch.randn(1, 512, generator=generator) + 1e-4 * torch.randn(len(y), 512, generator=generator)
    covariance = Problem(*standardize(x), y, 10).covariance
    assert torch.linalg.cholesky_ex(covariance + 1e-6 * torch.eye(512)).info, "this covariance has a factor: no test"
    one = logistic(along, y, along[:500], y[:500]).accuracy
    assert abs(logistic(x, y, x[:500], y[:500]).accuracy - one) < 0.02


def reference_numbers(scores: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Top-5 accuracy and the mean accuracy per class, from sorted scores in float64; -inf is never predicted."""
    five, by_class = [], {}
    for row, label in zip(scores.double(), labels.tolist()):
        best = [c for c in row.sort(descending=True, stable=True).indices.tolist()[:5] if row[c] > -torch.inf]
        five.append(label in best)
        by_class.setdefault(label, []).append(best[0] == label)
    return sum(five) / len(five), sum(sum(right) / len(right) for right in by_class.values()) / len(by_class)


def test_knn_reports_top_5_and_the_accuracy_of_each_class():
    train, y, test, labels = features(classes=12, noise=3.0)
    s = normalize(test.double(), dim=1) @ normalize(train.double(), dim=1).T
    nearest, j = s.topk(8, dim=1)
    scores = torch.zeros(len(test), 12, dtype=torch.float64).scatter_add_(1, y[j], (nearest / 0.1).exp())
    found = knn(train, y, test, labels, k=8)
    five, mean = reference_numbers(scores.masked_fill(scores == 0, -torch.inf), labels)
    assert (found.top5, found.mean_per_class) == pytest.approx((five, mean)) and found.accuracy < five < 1
    one = next(row for row in found.per_class if row["label"] == 3)
    mine = labels == 3
    assert one == {
        "label": 3,
        "n": int(mine.sum()),
        "accuracy": pytest.approx(found.correct[mine].double().mean().item()),
    }
    assert sum(row["n"] for row in found.per_class) == len(labels)
    assert found.to_dict()["per_class"] == found.per_class and found.to_dict()["top5"] == found.top5


def test_logistic_keeps_the_labels_of_classes_with_gaps():
    train, y, test, labels = features(classes=8, noise=2.0)
    plain, gaps = logistic(train, y, test, labels), logistic(train, 10 * y + 3, test, 10 * labels + 3)
    assert gaps.top5 == plain.top5 > plain.accuracy and gaps.mean_per_class == plain.mean_per_class
    assert [row["label"] for row in gaps.per_class] == [10 * row["label"] + 3 for row in plain.per_class]


def test_up_to_five_classes_have_no_top_5():
    train, y, test, labels = features(classes=5)
    assert knn(train, y, test, labels, k=8).top5 is None and logistic(train, y, test, labels).top5 is None


def test_scores_that_are_not_numbers_are_never_among_the_best_five():
    scores = torch.full((3, 9), torch.nan)
    found = predictions(scores, torch.tensor([0, 4, 8]))
    assert found.among_five.tolist() == found.correct.tolist()


def test_few_shot_averages_over_seeds():
    train, y, test, labels = features(classes=8, noise=2.0)
    whole = few_shot(train, y, test, labels, shots=5, seeds=(0, 1))
    each = [few_shot(train, y, test, labels, shots=5, seeds=(seed,)) for seed in (0, 1)]
    for key in ("accuracy", "top5", "mean_per_class"):
        assert getattr(whole, key) == pytest.approx(sum(getattr(one, key) for one in each) / 2)
    assert whole.per_class[0]["accuracy"] == pytest.approx(sum(one.per_class[0]["accuracy"] for one in each) / 2)


def test_few_shot_does_not_choose_by_a_handful_of_images():
    """A fifth of 20 images settles nothing, and ties went to the strongest regularization."""
    train, y, test, labels = features(classes=10, noise=2.0)
    found = few_shot(train, y, test, labels, shots=2)
    assert (found.protocol["C"], found.protocol["grid"], found.protocol["held_out"]) == (1.0, [1.0], None)


def test_few_shot_reports_what_differs_between_seeds():
    train, y, test, labels = features(classes=5)
    probe = partial(logistic, grid=GRID)
    each = [few_shot(train, y, test, labels, shots=4, seeds=(seed,), probe=probe).protocol for seed in (0, 1, 2)]
    together = few_shot(train, y, test, labels, shots=4, probe=probe).protocol
    assert len({one["held_out"] for one in each}) > 1, "else this shows nothing"
    assert together["held_out"] == [one["held_out"] for one in each] and together["grid"] == list(GRID)
