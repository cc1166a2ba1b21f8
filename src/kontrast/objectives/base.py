"""The contract of every objective, and the registry of their names.

V views, B images, W views of teacher keys, M rows of the bank, D width.  z [V,B,D], keys [W,B,D], bank [M,D], ids [B].
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kontrast import distributed
from kontrast.objectives.arguments import choice, switch
from kontrast.objectives.inputs import Inputs, checked
from kontrast.objectives.pairs import Pairs
from kontrast.registry import Registry

ELSEWHERE = {
    "supcon": "SupCon is nt-xent with ids=labels",
    "simclr": "SimCLR's loss is nt-xent",
    "moco": "MoCo's loss is info-nce with keys= and bank=",
}
OBJECTIVES = Registry("objective", hints=ELSEWHERE)


class Terms(dict[str, Tensor]):
    """Named terms of a loss: `terms["attraction"]` or `terms.attraction`; their sum is the loss, `terms.total`."""

    def __init__(self, **terms: Tensor):
        super().__init__(terms)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no term {name!r}: the terms are {', '.join(self)}") from None

    @property
    def total(self) -> Tensor:
        return functools.reduce(torch.add, self.values())


class Objective(nn.Module):
    """A loss of projections: attraction of each anchor to its positives, repulsion from the rest.

    `objective(z)` takes the projections of V views, `objective(z1, z2)` those of two. `keys=` are a teacher's
    projections of the same images and `bank=` rows of earlier keys; neither gets a gradient. Keys are put on the unit
    sphere where z is, a bank is used as it is. With one query view every key view is another view of its image; with
    more, key view w shows the same picture as query view w, so the positives of view v are the keys w != v.
    `ids=` are one whole number an image: images with the same id are positives too. Where it is an argument,
    `normalize` false takes the rows as they are, and `reduction` is over anchors: `mean`, `sum`, or `simclr_tf`, which
    adds the means of the views.

    The value is the loss of all ranks' images together; distributed.py tells the gradient's convention. Sums are kept
    in float32 at least, whatever the autocast; z of half precision is multiplied with the negatives in that type.
    A subclass writes `contrast`.
    """

    paper: str
    takes_bank = False
    takes_ids = False
    no_bank = "it has no negatives to take from there"

    def __init__(self, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__()
        self.normalize = switch("normalize", normalize)
        self.reduction = choice("reduction", reduction, ("mean", "sum", "simclr_tf"))

    def contrast(self, pairs: Pairs) -> Terms:
        """The terms: rows of the anchors, of which the loss is the mean, or scalars over the images of all ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no contrast(pairs): write it, and return its Terms")

    def forward(
        self,
        z: Tensor,
        z2: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        bank: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """The loss, a scalar."""
        return self.terms(z, z2, keys=keys, bank=bank, ids=ids).total

    def terms(
        self,
        z: Tensor,
        z2: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        bank: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Terms:
        """The named terms, scalars whose sum is the loss; a repulsion of 0 where nothing is repelled."""
        inputs = self._inputs(z, z2, keys, bank, ids)
        with torch.autocast(z.device.type, enabled=False):
            pairs = self.pairs(inputs)
            terms = Terms(**self.contrast(pairs))  # one of the user's own may be a plain dict
            empty = [name for name, term in terms.items() if not term.numel()]
            if empty:
                raise ValueError(f"{self}: its {' and '.join(empty)} is empty; means are made where with_mean=True")
            means = {name: term.mean() for name, term in terms.items() if term.ndim}
            if self.reduction != "mean":
                means = self._scaled(means, terms, pairs.N)
            terms.update(joined(means))
            if "repulsion" not in terms:
                terms["repulsion"] = torch.zeros_like(next(iter(terms.values())))
        return terms

    def _scaled(self, means: dict[str, Tensor], terms: Terms, images: int) -> dict[str, Tensor]:
        """The means times the number of anchors, or of views alone; all by one factor, so that the loss is scaled."""
        if len(means) < len(terms):
            raise ValueError(f"{self} has a term of the batch as a whole, which has no {self.reduction}: use mean")
        views = max(len(term) for term in terms.values())
        factor = views * images if self.reduction == "sum" else views
        return {name: mean * factor for name, mean in means.items()}

    def rows(
        self,
        z: Tensor,
        z2: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        bank: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """The loss of each anchor of this rank [V,B], whatever the reduction; only query views have rows."""
        inputs = self._inputs(z, z2, keys, bank, ids)
        with torch.autocast(z.device.type, enabled=False):
            terms = self.contrast(self.pairs(inputs))
        whole = [name for name, term in terms.items() if not term.ndim]
        if whole:
            raise ValueError(f"{self} has no loss per anchor: its {' and '.join(whole)} is of the batch as a whole")
        V = max(len(term) for term in terms.values())
        # Views that are queries in some terms only: the rows are scaled so that the mean over [V,B] stays the loss.
        padded = [nn.functional.pad(t * (V / len(t)), (0, 0, 0, V - len(t))) for t in terms.values()]
        return torch.stack(padded).sum(0)

    def pairs(self, inputs: Inputs) -> Pairs:
        """Anchors, positives and negatives, of unit length where the paper normalises."""
        return Pairs(inputs, normalize=self.normalize)

    def _inputs(
        self, z: Tensor, z2: Tensor | None, keys: Tensor | None, bank: Tensor | None, ids: Tensor | None
    ) -> Inputs:
        name = type(self).__name__
        for given, takes, what in (
            (bank, self.takes_bank, f"bank: {self.no_bank}"),
            (ids, self.takes_ids, "ids: its positives are the views of one image"),
        ):
            if given is not None and not takes:
                raise ValueError(f"{name} takes no {what}")
        if ids is not None and (keys is not None or bank is not None):
            raise ValueError("ids were given with keys or a bank, whose rows have none: give ids with z alone")
        return checked(z, z2, keys, bank, ids)

    def extra_repr(self) -> str:
        names: Any = inspect.signature(type(self).__init__).parameters
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if name != "self")


def joined(means: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each rank's means as those of all ranks' rows, by one message."""
    if distributed.world() == 1 or not means:
        return means
    return dict(zip(means, distributed.mean(torch.stack(list(means.values()))).unbind()))


def objective(name: str, **arguments: Any) -> Objective:
    """Build an objective by its name: `objective("cacr", t_plus=1.0, t_minus=2.0)`."""
    built: Objective = OBJECTIVES.build(name, **arguments)
    return built
