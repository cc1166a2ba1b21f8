"""Sums of objectives: value, gradient, terms, rows, and which inputs each part is given."""

from __future__ import annotations

import pytest
import torch

from kontrast.objectives import DCL, BarlowTwins, CrossEntropy, InfoNCE, KoLeo, LeJEPA, NTXent, Sum, SwAV, VICReg


def test_value_and_gradient_are_the_weighted_sums(projections):
    z = projections.requires_grad_()
    first, second = NTXent(temperature=0.5), VICReg()
    loss = Sum([first, second], weights=[2.0, 0.5])
    (mine,) = torch.autograd.grad(loss(z), z)
    (theirs,) = torch.autograd.grad(2 * first(z) + 0.5 * second(z), z)
    torch.testing.assert_close(loss(z), 2 * first(z) + 0.5 * second(z))
    torch.testing.assert_close(mine, theirs)


def test_terms_are_those_of_the_first_and_a_total_per_further_part(projections):
    first, second = NTXent(), DCL(temperature=0.3)
    terms = Sum([first, second, second], weights=[1.0, 0.1, 0.2]).terms(projections)
    assert list(terms) == ["attraction", "repulsion", "dcl", "dcl-2"]
    torch.testing.assert_close(terms["dcl-2"], 0.2 * second(projections))
    torch.testing.assert_close(terms.total, first(projections) + 0.3 * second(projections))


def test_rows_are_summed_if_every_part_has_them(projections):
    first, second = NTXent(), DCL()
    rows = Sum([first, second], weights=[1.0, 3.0]).rows(projections)
    torch.testing.assert_close(rows, first.rows(projections) + 3 * second.rows(projections))
    with pytest.raises(ValueError, match="no loss per anchor"):
        Sum([first, VICReg()]).rows(projections)


def test_each_part_is_given_what_it_uses(projections, keys, bank):
    first, second = InfoNCE(), VICReg()
    loss = Sum([first, second])
    expected = first(projections, keys=keys, bank=bank) + second(projections, keys=keys)
    torch.testing.assert_close(loss(projections, keys=keys, bank=bank), expected)


def test_an_input_that_no_part_uses_is_refused(projections, bank):
    with pytest.raises(ValueError, match="takes no bank"):
        Sum([VICReg(), BarlowTwins()])(projections, bank=bank)


def test_parameters_and_learned_numbers_of_the_parts_are_its_own(projections):
    loss = Sum([NTXent(temperature="learned"), DCL()])
    loss(projections).backward()
    assert [p.grad is not None for p in loss.parameters()] == [True]
    assert list(loss.learned_numbers()) == ["parts.0.temperature"]


@pytest.mark.parametrize("parts, weights", [([], []), ([NTXent()], [1.0, 2.0]), (["nt-xent"], [1.0])])
def test_wrong_parts_are_refused(parts, weights):
    with pytest.raises(ValueError, match="give objectives and one weight for each"):
        Sum(parts, weights)


class Queues(VICReg):
    """Takes one queue per view."""

    takes_bank = bank_per_view = True


def test_dino_with_koleo_on_the_global_views(projections):
    """What DINOv2 does: KoLeo is given the number of global views, the other objective is not."""
    z = torch.cat([projections, 0.5 * projections.flip(0)]).requires_grad_()
    first, second = NTXent(), KoLeo()
    loss = Sum([first, second], weights=[1.0, 0.2])
    expected = first(z) + 0.2 * second(z[:2])
    torch.testing.assert_close(loss(z, global_views=2), expected)
    mine, theirs = (torch.autograd.grad(x, z)[0] for x in (loss(z, global_views=2), expected))
    torch.testing.assert_close(mine, theirs)
    assert list(loss.terms(z, global_views=2)) == ["attraction", "repulsion", "koleo"]
    rows = loss.rows(z, global_views=2)  # KoLeo has rows of two views, scaled so that the mean is the loss
    assert rows.shape == z.shape[:2]
    torch.testing.assert_close(rows.mean(), expected)


def test_a_part_on_features_takes_them_in_place_of_the_projections(projections):
    """DINOv2's KoLeo is of the encoder's features. It gets no keys, which are projections."""
    z, features = (torch.randn(3, 7, width, dtype=projections.dtype) for width in (5, 12))
    first, second = InfoNCE(), KoLeo()
    loss, keys = Sum([first, second], [1.0, 0.2], ["projections", "features"]), z.flip(0)
    found = loss(z, features=features, keys=keys, global_views=2)
    torch.testing.assert_close(found, first(z, keys=keys) + 0.2 * second(features[:2]))
    with pytest.raises(ValueError, match="needs features="):
        loss(projections)
    with pytest.raises(ValueError, match="takes none otherwise"):
        Sum([first, second])(projections, features=features)
    with pytest.raises(ValueError, match="on is 'encoder'"):
        Sum([first, second], on=["projections", "encoder"])
    with pytest.raises(ValueError, match="not 1 for 2"):
        Sum([first, second], on=["features"])
    with pytest.raises(ValueError, match="can't be on features"):
        Sum([first, SwAV()], on=["projections", "features"])


def test_many_parts_of_one_name_have_names_of_their_own(projections):
    terms = Sum([DCL() for _ in range(4)]).terms(projections)
    assert list(terms) == ["attraction", "repulsion", "dcl-2", "dcl-3", "dcl-4"]
    torch.testing.assert_close(terms.total, 4 * DCL()(projections))


def test_a_sum_takes_and_needs_what_any_part_does(projections):
    loss = Sum([NTXent(), CrossEntropy(classes=3, width=5), LeJEPA()])
    assert loss.takes_labels and loss.needs_labels and loss.takes_global_views
    assert loss.takes_bank and not loss.needs_prototypes and not loss.bank_per_view
    with pytest.raises(ValueError, match="CrossEntropy needs labels"):
        loss(projections)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    parts = [part(projections, **({} if n == 2 else {"labels": labels})) for n, part in enumerate(loss.parts)]
    torch.testing.assert_close(loss(projections, labels=labels), sum(parts))


def test_buffers_of_the_parts_change_in_the_backward_pass(projections):
    loss = Sum([NTXent(), LeJEPA(directions=4)])
    loss(projections.requires_grad_()).backward()
    assert loss.state_dict()["parts.1.step"] == 1


def test_a_sum_compiles_into_one_graph(projections):
    z, loss = projections.requires_grad_(), Sum([NTXent(), KoLeo()], weights=[1.0, 0.1])
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(z)
    torch.testing.assert_close(compiled, loss(z))
    torch.testing.assert_close(torch.autograd.grad(compiled, z), torch.autograd.grad(loss(z), z))


def test_weights_are_numbers_of_at_least_zero():
    with pytest.raises(ValueError, match=r"weight is -1\.0"):
        Sum([NTXent()], [-1.0])
    with pytest.raises(ValueError, match="weight gets no gradient here"):
        Sum([NTXent()], [torch.nn.Parameter(torch.tensor(1.0))])


def test_no_bank_serves_objectives_with_different_banks():
    with pytest.raises(ValueError, match="no bank serves both"):
        Sum([NTXent(), Queues()])
    assert Sum([VICReg(), Queues()]).bank_per_view
