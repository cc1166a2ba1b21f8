"""The base class of every objective, and the registry of their names.

V views, B images, W views of teacher keys, M rows of the bank, K prototypes, D width.  z [V,B,D], keys [W,B,D], bank
[M,D], prototypes [K,D], labels and indices [B].
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from kontrast import distributed
from kontrast.kernels.row_loss import RowLoss
from kontrast.kernels.row_statistics import refuse
from kontrast.kernels.two_view_loss import computes, fits_two_view_loss, two_view_loss
from kontrast.objectives.arguments import choice, switch
from kontrast.objectives.inputs import Inputs, OptionalInputs, check_finite, check_inputs
from kontrast.objectives.learned_temperature import LearnedTemperature
from kontrast.objectives.pairs import Pairs
from kontrast.registry import Registry

HINTS = {
    "supcon": "SupCon is nt-xent with labels=",
    "simclr": "SimCLR's loss is nt-xent",
    "moco": "MoCo's loss is info-nce with keys= and bank=",
    "mocov3": "MoCo v3's loss is info-nce with keys=, loss_scale='2tau' and reduction='simclr_tf'",
    "clip": "CLIP's loss is info-nce with symmetric=True",
    "triplet": "the triplet loss is cacr with margin=",
    "infoloob": "InfoLOOB is dcl with negatives='cross-view'",
}
OBJECTIVES = Registry("objective", hints=HINTS)
USES = {
    "bank": "takes_bank", "labels": "takes_labels", "global_views": "takes_global_views", "indices": "needs_indices",
    "prototypes": "needs_prototypes", "key_prototypes": "needs_prototypes",
}  # fmt: skip
"""The attribute that says whether an objective uses an input; every objective takes keys."""
NEEDED = {
    "bank": "give earlier keys [M,D], for example kontrast.networks.MemoryBank(M, D)()",
    "labels": "give the class of each image, whole numbers of shape [B]",
    "prototypes": "give [K,D], for example kontrast.networks.Prototypes(K, D)()",
    "indices": "give the index of each image in the data set, whole numbers of shape [B]",
}


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
        prototypes      keys that are learned, used as they are; they get their gradient (`networks.Prototypes`)
        key_prototypes  those of a teacher, without gradient; if not given, the prototypes themselves
        indices         the index of each image in the data set, for estimates that are stored per image
        global_views    how many of the first views are global; the others are local crops. Default: all

    An objective refuses what it has no use for, and says what it needs. The value is the loss over the images of all
    ranks; distributed.py explains the gradient. Sums are float32 at least, also under autocast; z of half precision is
    multiplied with the negatives in that type. A subclass defines `contrast`.

    A number that a subclass checks with `positive`, `weight` or `number` may be given as a tensor or an `nn.Parameter`
    of shape [], and gets its gradient. Parameters of an objective are trained, saved and synchronized over ranks like
    those of the network.

    Args:
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, which adds the means of the views.

    Shape:
        z [V,B,D] or two tensors [B,D], keys [W,B,D], bank [M,D], prototypes [K,D], labels and indices [B]; the loss is
        a scalar, `rows` [V,B].

    Example:
        >>> class Pull(Objective):
        ...     def contrast(self, pairs):
        ...         return Terms(attraction=-pairs.positive)
        >>> Pull()(torch.eye(3), torch.eye(3))
        tensor(-1.)
    """

    paper: str
    equation = ""  # the loss in LaTeX for its page: one equation per line, continued by lines that are indented more
    takes_bank = False
    bank_per_view = False
    takes_labels = False
    takes_global_views = False
    needs_bank = False
    needs_labels = False
    needs_prototypes = False
    needs_indices = False

    def __init__(self, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__()
        self.normalize = switch("normalize", normalize)
        self.reduction = choice("reduction", reduction, ("mean", "sum", "simclr_tf"))

    def contrast(self, pairs: Pairs) -> Terms:
        """Return the terms, each a tensor of rows per anchor, or a scalar over the images of all ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no contrast(pairs): define it and return its Terms")

    def forward(self, z: Tensor, z2: Tensor | None = None, **given: Unpack[OptionalInputs]) -> Tensor:
        """Return the loss, a scalar."""
        if all(x is None for x in given.values()):
            fused = self._try_fused_loss(z, z2)
            if fused is not None:
                return fused
        inputs = self._check(z, z2, given)
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

        It takes the place of `contrast` if the loss is called from Python, and leaves the host little to do. For large
        batches, and on the CPU for small ones, that holds for losses of the lse over all rows. A subclass that changes
        the loss has to define it too, or it is not used.
        """
        return None

    def fused_loss(self, z: Tensor, z2: Tensor | None) -> Tensor | None:
        """Return the loss of two views, z [2,B,D] or z and z2 [B,D], by `row_loss`, or None if there is no formula."""
        row_loss = self.row_loss(z.shape[-2])
        return two_view_loss(z, z2, row_loss) if row_loss is not None and computes(row_loss, z) else None

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

    def terms(self, z: Tensor, z2: Tensor | None = None, **given: Unpack[OptionalInputs]) -> Terms:
        """Return the named terms, scalars whose sum is the loss. The repulsion is 0 if nothing is repelled."""
        inputs = self._check(z, z2, given)
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

    def rows(self, z: Tensor, z2: Tensor | None = None, **given: Unpack[OptionalInputs]) -> Tensor:
        """Return the loss of each anchor of this rank [V,B], whatever the reduction; only query views have rows."""
        inputs = self._check(z, z2, given)
        with without_autocast(inputs.z.device.type):
            terms = self.contrast(self.pairs(inputs))
        check_finite((inputs.z,), *terms.values())
        self._count_views(terms, "loss per anchor")
        return torch.stack(pad_views(list(terms.values()))).sum(0)

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

    def _check(self, z: Tensor, z2: Tensor | None, given: OptionalInputs) -> Inputs:
        there = [name for name, value in given.items() if value is not None]
        for name in there:
            if name in USES and not getattr(self, USES[name]):
                raise ValueError(f"{type(self).__name__} takes no {name}: leave out {name}=")
        for name, advice in NEEDED.items():
            if getattr(self, f"needs_{name}") and name not in there:
                raise ValueError(f"{type(self).__name__} needs {name}=: {advice}")
        if "labels" in there and ("keys" in there or "bank" in there):
            raise ValueError("labels don't go with keys or a bank, whose rows have none: give labels with z alone")
        inputs = check_inputs(z, z2, **given)
        if inputs.bank is not None and (inputs.bank.ndim == 3) != self.bank_per_view:
            wanted = "[W,M,D], one queue per global view" if self.bank_per_view else "[M,D]"
            refuse("bank", inputs.bank, wanted)
        return inputs

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


def pad_views(rows: list[Tensor]) -> list[Tensor]:
    """Give all rows [V,B] the same number of views; some views may be queries of some of them only.

    Rows are scaled so that the mean over [V,B] stays the loss.
    """
    V = max(map(len, rows))
    return [nn.functional.pad(r * (V / len(r)), (0, 0, 0, V - len(r))) if len(r) < V else r for r in rows]


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
