"""The base class of every objective, and the registry of their names.

V views, B images, W views of teacher keys, M rows of the bank, D width.  z [V,B,D], keys [W,B,D], bank [M,D], labels
[B].
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kontrast import distributed
from kontrast.kernels.row_loss import RowLoss
from kontrast.kernels.two_view_loss import fits_two_view_loss, two_view_loss
from kontrast.objectives.arguments import choice, switch
from kontrast.objectives.inputs import Inputs, check_finite, check_inputs
from kontrast.objectives.learned_temperature import LearnedTemperature
from kontrast.objectives.pairs import Pairs
from kontrast.registry import Registry

HINTS = {
    "supcon": "SupCon is nt-xent with labels=",
    "simclr": "SimCLR's loss is nt-xent",
    "moco": "MoCo's loss is info-nce with keys= and bank=",
    "clip": "CLIP's loss is info-nce with symmetric=True",
    "infoloob": "InfoLOOB is dcl with negatives='cross-view'",
}
OBJECTIVES = Registry("objective", hints=HINTS)


class Terms(dict[str, Tensor]):
    """The named terms of a loss, whose sum is the loss.

    Args:
        terms: tensors by name; read them as `terms["attraction"]` or `terms.attraction`.

    Example:
        >>> terms = Terms(attraction=torch.tensor(-2.0), repulsion=torch.tensor(3.0))
        >>> terms.repulsion, terms.total
        (tensor(3.), tensor(1.))
    """

    def __init__(self, **terms: Tensor):
        super().__init__(terms)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no term {name!r}: the terms are {', '.join(self)}") from None

    @property
    def total(self) -> Tensor:
        """The sum of all terms."""
        return functools.reduce(torch.add, self.values())


class Objective(nn.Module):
    """A loss of projections: each anchor is attracted to its positives and repelled from the rest.

    `objective(z)` takes the projections of V views and `objective(z1, z2)` those of two views. Call it, `terms` and
    `rows` with:

        keys    a teacher's projections of the same images; they get no gradient and are normalized if z is. With one
                query view, every key view is a positive. With more, key view w shows the same crop as query view w, so
                the positives of view v are the keys w != v.
        bank    earlier keys as negatives, used as they are; they get no gradient
        labels  one whole number per image: images with the same label are no negatives of each other, and with nt-xent
                and dcl they are positives

    The value is the loss over the images of all ranks; distributed.py explains the gradient. Sums are float32 at least,
    also under autocast; z of half precision is multiplied with the negatives in that type. A subclass defines
    `contrast`.

    A number that a subclass checks with `positive`, `weight` or `number` may be given as a tensor or an `nn.Parameter`
    of shape [], and gets its gradient. Parameters of an objective are trained, saved and synchronized over ranks like
    those of the network.

    Args:
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, which adds the means of the views.

    Shape:
        z [V,B,D] or two tensors [B,D], keys [W,B,D], bank [M,D], labels [B]; the loss is a scalar, `rows` [V,B].

    Example:
        >>> class Pull(Objective):
        ...     def contrast(self, pairs):
        ...         return Terms(attraction=-pairs.positive)
        >>> Pull()(torch.eye(3), torch.eye(3))
        tensor(-1.)
    """

    paper: str
    takes_bank = False
    takes_labels = False

    def __init__(self, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__()
        self.normalize = switch("normalize", normalize)
        self.reduction = choice("reduction", reduction, ("mean", "sum", "simclr_tf"))

    def contrast(self, pairs: Pairs) -> Terms:
        """Return the terms, each a tensor of rows per anchor, or a scalar over the images of all ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no contrast(pairs): define it and return its Terms")

    def forward(
        self, z: Tensor, z2: Tensor | None = None, *,
        keys: Tensor | None = None, bank: Tensor | None = None, labels: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the loss, a scalar."""
        if keys is None and bank is None and labels is None:
            fused = self._try_fused_loss(z, z2)
            if fused is not None:
                return fused
        inputs = self._check(z, z2, keys, bank, labels)
        with without_autocast(inputs.z.device.type):
            terms, pairs = self._contrast(inputs)
            first, *others = terms.values()
            if self.reduction == "mean" and distributed.world() == 1 and all(x.shape == first.shape for x in others):
                total = terms.total  # its mean is the sum of the means, in fewer operations
                loss = total.mean() if total.ndim else total
            else:
                loss = self._reduce(terms, pairs).total
        check_finite((inputs.z,), loss)
        return loss

    def row_loss(self, images: int) -> RowLoss | None:
        """Return the loss of two views of so many images as a formula of row statistics, or None.

        On a CUDA device it takes the place of `contrast` for small batches, if they are called from Python: it leaves
        the host little to do. A subclass that changes the loss has to define it too, or it is not used.
        """
        return None

    def fused_loss(self, z: Tensor, z2: Tensor | None) -> Tensor | None:
        """Return the loss of two views, z [2,B,D] or z and z2 [B,D], by `row_loss`, or None if there is no formula."""
        row_loss = self.row_loss(z.shape[-2])
        return None if row_loss is None else two_view_loss(z, z2, row_loss)

    def _try_fused_loss(self, z: Tensor, z2: Tensor | None) -> Tensor | None:
        """Return the fused loss if the class itself, not a class that it inherits from, has one for these inputs."""
        usual = self.reduction == "mean" and self.normalize and fits_two_view_loss(z, z2) and distributed.world() == 1
        if not usual or not ("row_loss" in vars(type(self)) or "fused_loss" in vars(type(self))):
            return None
        with without_autocast(z.device.type):
            loss = self.fused_loss(z, z2)
        if loss is not None:
            check_finite((z, z2), loss)
        return loss

    def terms(
        self, z: Tensor, z2: Tensor | None = None, *,
        keys: Tensor | None = None, bank: Tensor | None = None, labels: Tensor | None = None,
    ) -> Terms:  # fmt: skip
        """Return the named terms, scalars whose sum is the loss. The repulsion is 0 if nothing is repelled."""
        inputs = self._check(z, z2, keys, bank, labels)
        with without_autocast(inputs.z.device.type):
            terms = self._reduce(*self._contrast(inputs))
        check_finite((inputs.z,), *terms.values())
        return terms

    def _contrast(self, inputs: Inputs) -> tuple[Terms, Pairs]:
        pairs = self.pairs(inputs)
        terms = Terms(**self.contrast(pairs))  # a user's own objective may return a plain dict
        empty = [name for name, term in terms.items() if not term.numel()]
        if empty:
            raise ValueError(f"{self}: {' and '.join(empty)} is empty; with_mean=True computes means")
        return terms, pairs

    def _reduce(self, terms: Terms, pairs: Pairs) -> Terms:
        """Average the rows of each term over the anchors of all ranks, or reduce them as asked."""
        means = {name: term.mean() for name, term in terms.items() if term.ndim}
        if self.reduction != "mean":
            anchors = self._count_views(terms, self.reduction) * (pairs.N if self.reduction == "sum" else 1)
            means = {name: mean * anchors for name, mean in means.items()}
        terms.update(average_over_ranks(means))
        if "repulsion" not in terms:
            terms["repulsion"] = torch.zeros_like(next(iter(terms.values())))
        return terms

    def rows(
        self, z: Tensor, z2: Tensor | None = None, *,
        keys: Tensor | None = None, bank: Tensor | None = None, labels: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the loss of each anchor of this rank [V,B], whatever the reduction; only query views have rows."""
        inputs = self._check(z, z2, keys, bank, labels)
        with without_autocast(inputs.z.device.type):
            terms = self.contrast(self.pairs(inputs))
        check_finite((inputs.z,), *terms.values())
        V = self._count_views(terms, "loss per anchor")
        # Some views may be queries in some terms only. Rows are scaled so that the mean over [V,B] stays the loss.
        padded = [nn.functional.pad(t * (V / len(t)), (0, 0, 0, V - len(t))) for t in terms.values()]
        return torch.stack(padded).sum(0)

    def pairs(self, inputs: Inputs) -> Pairs:
        """Return anchors, positives and negatives, normalized if the paper does so."""
        return Pairs(inputs, normalize=self.normalize)

    def _count_views(self, terms: dict[str, Tensor], wanted: str) -> int:
        """Return the number of views with rows, if every term has rows."""
        scalars = [name for name, term in terms.items() if not term.ndim]
        if scalars:
            which = f"{' and '.join(scalars)} {'is a term' if len(scalars) == 1 else 'are terms'} of the whole batch"
            raise ValueError(f"{self} has no {wanted}: {which}; use mean")
        return max(len(term) for term in terms.values())

    def _check(
        self, z: Tensor, z2: Tensor | None, keys: Tensor | None, bank: Tensor | None, labels: Tensor | None
    ) -> Inputs:
        for name, given, taken in (("bank", bank, self.takes_bank), ("labels", labels, self.takes_labels)):
            if given is not None and not taken:
                raise ValueError(f"{type(self).__name__} takes no {name}: leave out {name}=")
        if labels is not None and (keys is not None or bank is not None):
            raise ValueError("labels don't go with keys or a bank, whose rows have none: give labels with z alone")
        return check_inputs(z, z2, keys, bank, labels)

    def learned_numbers(self) -> dict[str, float]:
        """Return the single numbers that are learned, such as a temperature, by name. Waits for the device."""
        own = {name: p.item() for name, p in self.named_parameters() if p.ndim == 0}
        for name, module in self.named_modules():
            if isinstance(module, LearnedTemperature):
                own.pop(f"{name}.log_scale")
                own[name] = float(module)
        return own

    def extra_repr(self) -> str:
        names = [name for name in inspect.signature(type(self).__init__).parameters if name != "self"]
        return ", ".join(f"{name}={describe_argument(getattr(self, name))}" for name in names)


def describe_argument(value: Any) -> str:
    """Return an argument as it was given; a tensor without its gradient."""
    if isinstance(value, LearnedTemperature):
        return "'learned'"
    return repr(value.detach() if isinstance(value, Tensor) else value)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off if it is on. Entering the context of torch costs more than most operations."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def average_over_ranks(means: dict[str, Tensor]) -> dict[str, Tensor]:
    """Average each rank's means over all ranks, in one message."""
    if distributed.world() == 1 or not means:
        return means
    return dict(zip(means, distributed.mean(torch.stack(list(means.values()))).unbind()))


def objective(name: str, **arguments: Any) -> Objective:
    """Build an objective by its name.

    Args:
        name: a registered name, for example `nt-xent`, `dcl` or `cacr`.
        **arguments: arguments of its class.

    Returns:
        The objective, a torch module.

    Returns:
        The objective, an `nn.Module`.

    Example:
        >>> objective("cacr", t_plus=1.0).t_minus
        2.0
    """
    built: Objective = OBJECTIVES.build(name, **arguments)
    return built
