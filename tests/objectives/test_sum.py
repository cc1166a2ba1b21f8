"""Sums of objectives: value, gradient, terms, rows, and which inputs each part is given."""

from __future__ import annotations

import pytest
import torch

from kontrast.objectives import DCL, BarlowTwins, InfoNCE, NTXent, Sum, VICReg


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
