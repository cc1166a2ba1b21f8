"""One learner for every method: student, and where the recipe asks for them a predictor, a teacher and a bank.

V query views, W key views, L local crops, B images, D width of the projection, M rows of the bank.

    queries z [V(+L),B,D] = predictor(head(encoder(views)))
    keys    k [W,B,D]     = the teacher's projections, or the student's own behind a stop-gradient, or none
    loss                  = objective(z, keys=k, bank=m)

Local crops are queries; without keys they are further views. Without a teacher the bank holds the student's own rows.

MoCo v2 is InfoNCE + teacher + bank; BYOL is alignment + teacher + predictor; SimSiam is alignment + predictor +
stop-gradient. No class per method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kontrast import distributed, networks, sharding
from kontrast.config.recipe import Recipe
from kontrast.errors import UsageError
from kontrast.networks import MemoryBank, SplitBatchNorm, Teacher, convert_split_batch_norm, shuffle, unshuffle
from kontrast.networks.catalog import Encoder, Head, Module
from kontrast.objectives import Objective, objective
from kontrast.objectives.base import Terms
from kontrast.objectives.inputs import values_unread
from kontrast.registry import nearest

BATCH_NORM = nn.modules.batchnorm._BatchNorm


class Outcome(NamedTuple):
    """What one forward yields: the named terms of the loss, and the rows the bank takes after the backward."""

    terms: Terms
    fresh: Tensor | None


class Student(nn.Module):
    """Encoder and projection head."""

    def __init__(self, encoder: Encoder, head: Head):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images))


def build_student(recipe: Recipe, channels: int) -> Student:
    """Encoder and head by the recipe, with fresh weights."""
    encoder = networks.encoder(
        recipe.encoder.name, channels=channels, size=recipe.views.size, **recipe.encoder.arguments
    )
    return Student(encoder, networks.head(recipe.head.name, encoder.width, **recipe.head.arguments))


class Learner(nn.Module):
    steps: Tensor
    width: int

    def __init__(self, recipe: Recipe, channels: int = 3):
        super().__init__()
        self.objective: Objective = objective(recipe.objective.name, **recipe.objective.arguments)
        check_options(recipe, self.objective)
        student = build_student(recipe, channels)
        check_crops(recipe, student.encoder, channels)
        if recipe.training.parallel == "fsdp":
            sharding.check_shardable(student.encoder, recipe.encoder.name)
        self.student = with_batch_norm(student, recipe)
        self.width = student.head.width
        self.predictor = None
        if recipe.predictor is not None:
            part = networks.predictor(recipe.predictor.name, self.width, **recipe.predictor.arguments)
            self.predictor = with_batch_norm(part, recipe)
        self.teacher = Teacher(self.student) if recipe.teacher else None
        self.bank = (
            MemoryBank(recipe.bank.size, self.width, normalise=recipe.bank.contents != "means") if recipe.bank else None
        )
        self.count = recipe.views.count
        self.asymmetric = recipe.teacher is not None and not recipe.teacher.symmetric
        self.contents = recipe.bank.contents if recipe.bank else ""
        self.stop_gradient, self.joint = recipe.training.stop_gradient, recipe.batch_norm.joint
        self.shuffled = recipe.batch_norm.kind == "split" and recipe.teacher is not None
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._compiled: dict[str, Callable[[Tensor], Tensor]] = {}
        self._norms: dict[str, list[Any]] = {
            n: [m for m in part.modules() if isinstance(m, BATCH_NORM)] for n, part in self.parts()
        }
        self.ramp_end = float(getattr(self.objective, recipe.objective.ramp)) if recipe.objective.ramp else 0.0
        if recipe.training.accumulate > 1 and draws_by_chance(self.student):
            raise UsageError(
                f"training.accumulate can't be used here: {recipe.encoder.name} has dropout, and the two passes over a "
                "part would drop different units"
            )

    def parts(self) -> list[tuple[str, nn.Module]]:
        named = {"student": self.student, "teacher": self.teacher, "predictor": self.predictor}
        return [(name, part) for name, part in named.items() if part is not None]

    def compiled(self) -> None:
        """Compile the networks; they are called through this table, so state dicts keep their plain names.

        Each size is compiled for itself: a program for any size is slower. What earlier runs of this process compiled
        is dropped, for the compiler takes only so many versions of one function, and runs the next one uncompiled."""
        torch.compiler.reset()
        self._compiled = {"student": torch.compile(self.student, dynamic=False)}
        if self.teacher is not None:
            self._compiled["teacher"] = torch.compile(self.teacher, dynamic=False)

    def network(self, name: str) -> Callable[[Tensor], Tensor]:
        return self._compiled[name] if name in self._compiled else getattr(self, name)

    def forward(
        self, views: Tensor, local: Tensor | None = None, momentum: Tensor | None = None, judged: bool = True
    ) -> Outcome | Tensor:
        """Terms of the loss for views [V,B,C,h,w] and local crops [L,B,C,l,l]; unjudged, the queries alone."""
        if not judged:
            return self.predict(self.projections(views, local))
        keys = self.teacher_keys(views, momentum)
        projections = self.projections(views, local)
        if self.stop_gradient:
            keys = projections[: views.shape[0]].detach()
        return self.judge(self.predict(projections), keys)

    def projections(self, views: Tensor, local: Tensor | None) -> Tensor:
        """The student's projections [V(+L),B,D] of the query views and local crops."""
        projections = self.per_view("student", views[:1] if self.asymmetric else views)
        return projections if local is None else torch.cat([projections, self.per_view("student", local)])

    def judge(self, z: Tensor, keys: Tensor | None) -> Outcome:
        """The objective on queries and keys, and what the bank will take."""
        inputs = {"keys": keys, "bank": None if self.bank is None else self.bank.rows}
        with values_unread():  # the step watches for NaN, on the device and on all ranks alike
            terms = self.objective.terms(z, **{k: v for k, v in inputs.items() if v is not None})
        return Outcome(terms, None if self.bank is None else self.fresh_rows(z[: self.count] if keys is None else keys))

    def predict(self, projections: Tensor) -> Tensor:
        return projections if self.predictor is None else self.per_view("predictor", projections)

    @torch.no_grad()
    def teacher_keys(self, views: Tensor, momentum: Tensor | None, parts: int = 1) -> Tensor | None:
        """The teacher's keys [W,B,D]; the teacher moves first, as MoCo's code does. parts: forwards that the images are
        shared out to. Those that are shuffled are before, or a key would find its query's partners in its part."""
        if self.teacher is None:
            return None
        if momentum is not None and self.training:
            self.teacher.update(self.student, momentum)
        pictures = views[1:] if self.asymmetric else views
        if not self.shuffled:
            return torch.cat([self.per_view("teacher", part) for part in pictures.chunk(parts, 1)], 1)
        if self.joint:  # JCL shuffles the keys of all views together
            keys = self.shuffled_keys(pictures.flatten(0, 1), self.steps, parts, len(pictures))
            return keys.unflatten(0, pictures.shape[:2])
        count = len(pictures)
        return torch.stack([self.shuffled_keys(x, self.steps * count + v, parts) for v, x in enumerate(pictures)])

    def shuffled_keys(self, pictures: Tensor, number: Tensor, parts: int, views: int = 1) -> Tensor:
        """Keys whose batch statistics come from other partners than their queries have (ShuffleBN)."""
        mixed, order = shuffle(pictures, number, views)
        return unshuffle(torch.cat([self.network("teacher")(part) for part in mixed.chunk(parts)]), order)

    def per_view(self, name: str, pictures: Tensor) -> Tensor:
        """[V,B,...] through a network in one forward; where batch statistics are to be a view's own, the batch norms
        see to it, and where they can't (over ranks), each view has a forward of its own. Where splits of all views
        together have them, a split has every view of its images, as a device has of its share."""
        network, norms = self.network(name), self._norms[name]
        if not self.joint and any(not isinstance(norm, SplitBatchNorm) for norm in norms):
            return torch.stack([network(picture) for picture in pictures])
        for norm in norms:
            norm.views = 1 if self.joint else len(pictures)
        splits = getattr(norms[0], "splits", 1) if norms and self.joint else 1
        if splits == 1 or len(pictures) == 1:
            return network(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
        shares = pictures.unflatten(1, (splits, -1)).transpose(0, 1)
        return network(shares.flatten(0, 2)).unflatten(0, shares.shape[:3]).transpose(0, 1).flatten(1, 2)

    def fresh_rows(self, keys: Tensor) -> Tensor:
        """What the bank takes of keys [W,B,D] from all ranks: the last view, all views, or JCL's means, which the bank
        itself puts on the sphere where they are to be `unit-means`."""
        own = torch.nn.functional.normalize(keys.detach().to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
        joined = distributed.gather(own, dim=1)  # view by view, so that any number of ranks gives the same rows
        if self.contents == "last":
            return joined[-1]
        return joined.flatten(0, 1) if self.contents == "all" else joined.mean(0)


def with_batch_norm(module: Module, recipe: Recipe) -> Module:
    """The module with batch norm that keeps parts or views apart where the recipe asks for it; `sync` is laid on when
    the device is known."""
    kind, joint = recipe.batch_norm.kind, recipe.batch_norm.joint
    if kind == "split" or (kind == "plain" and not joint):
        return convert_split_batch_norm(module, own_splits(recipe) if kind == "split" else 1)
    return module


def own_splits(recipe: Recipe) -> int:
    """The splits of what one rank takes at once. They are of the whole batch, standing for the devices of a paper, so
    where there are devices each has its share of them, and as many images a split."""
    return max(1, recipe.batch_norm.splits // (distributed.world() * recipe.training.accumulate))


def draws_by_chance(module: nn.Module) -> bool:
    """Whether a forward in training draws random numbers: dropout of units or of paths."""
    kinds = ("Dropout", "DropPath", "StochasticDepth")
    found = [m for m in module.modules() if type(m).__name__.startswith(kinds)]
    return any((getattr(m, "p", 0) or getattr(m, "drop_prob", 0) or 0) > 0 for m in found)


def refuse(option: str, reason: str) -> None:
    raise UsageError(f"{option} can't be used here: {reason}")


def check_options(recipe: Recipe, judge: Objective) -> None:
    """Refuse, with the reason, options that the objective or each other can't use."""
    check_keys_and_bank(recipe, judge)
    check_views(recipe)
    check_batch(recipe)
    ramp, kind = recipe.objective.ramp, type(judge)
    if ramp:
        movable = [n for n, p in vars(kind).items() if isinstance(p, property) and p.fset is not None]
        if ramp not in movable:
            refuse(f"objective.ramp = {ramp!r}", f"in {recipe.objective.name}, {nearest(ramp, movable)}")


def check_keys_and_bank(recipe: Recipe, judge: Objective) -> None:
    name = recipe.objective.name
    if recipe.teacher is not None and recipe.training.stop_gradient:
        refuse("training.stop_gradient", "with a teacher the keys carry no gradient already")
    if recipe.bank is not None and not judge.takes_bank:
        refuse("a bank", f"{name} has no form with a memory bank")


def check_views(recipe: Recipe) -> None:
    has_keys = recipe.teacher is not None or recipe.training.stop_gradient
    if not has_keys and recipe.views.count < 2:
        refuse("views.count = 1", f"{recipe.objective.name} needs at least 2 views")
    if recipe.teacher is not None and recipe.views.count < 2:
        refuse("views.count = 1", "a teacher needs another view to answer for: at least 2")
    if recipe.training.stop_gradient and recipe.views.count < 2:
        refuse("views.count = 1", "a stop-gradient needs another view: at least 2")
    if recipe.views.local_count and recipe.teacher is not None and not recipe.teacher.symmetric:
        refuse("views.local_count", "local crops are queries beside both views: the [teacher] must be symmetric")


def check_crops(recipe: Recipe, encoder: Encoder, channels: int) -> None:
    """Refuse local crops of a size that the encoder can't take: some take only the size they were built for."""
    size, training = recipe.views.local_size, encoder.training
    if not recipe.views.local_count or size < 1:
        return
    try:
        with torch.no_grad():
            encoder.eval()(torch.zeros(1, channels, size, size))
    except (RuntimeError, ValueError, AssertionError) as error:
        if "alloc" in str(error).lower() or "overflowed" in str(error):  # memory, of which the run itself tells
            raise
        name, reason = recipe.encoder.name, " ".join(str(error).split())
        raise UsageError(f"views.local_size = {size} can't be used here: {name} can't take it ({reason})") from error
    finally:
        encoder.train(training)


def check_batch(recipe: Recipe) -> None:
    batch, parts, splits = recipe.training.batch, recipe.training.accumulate, own_splits(recipe)
    ranks = distributed.world()
    if batch % (parts * ranks):
        whole = f"the batch {batch}" if ranks == 1 else f"each of {ranks} ranks' share of the batch {batch}"
        refuse(f"training.accumulate = {parts}", f"it must divide {whole}")
    if recipe.batch_norm.kind == "split" and batch // ranks // parts % splits:
        share = f"its {splits} of what a rank takes at once" if ranks * parts > 1 else "it"
        images = f"{batch // ranks // parts} images"
        refuse(f"batch_norm.splits = {recipe.batch_norm.splits}", f"{share} must divide {images}")
