"""One learner for every method: a student and, if the recipe has them, predictor, teacher, bank and prototypes.

V query views, W key views, L local crops, B images, D width of the projection, M rows of the bank, K prototypes.

    queries z [V(+L),B,D] = predictor(head(encoder(views)))
    keys    k [W,B,D]     = projections of the teacher, or of the student with a stop-gradient, or none
    loss                  = objective(z, keys=k, bank=m, prototypes=c)

With a text tower a caption of each image is its last view: z [V+1(+L),B,D], and keys [W+1,B,D] with a teacher.

Local crops are queries; without keys they are further views. Without a teacher the bank stores the student's own rows.

MoCo v2 is InfoNCE + teacher + bank; BYOL is alignment + teacher + predictor; SimSiam is alignment + predictor +
stop-gradient; SwAV is swav + prototypes + bank; DINO is dino + prototypes + teacher. There is no class per method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kontrast import distributed, networks, sharding
from kontrast.config.recipe import Recipe
from kontrast.networks import (
    MemoryBank,
    Prototypes,
    SplitBatchNorm,
    Teacher,
    convert_split_batch_norm,
    shuffle,
    unshuffle,
)
from kontrast.networks.catalog import Module
from kontrast.objectives import OBJECTIVES, Objective, Sum, objective
from kontrast.objectives.base import Terms
from kontrast.objectives.inputs import OptionalInputs, values_unread
from kontrast.training.compiled_blocks import CompiledBlocks
from kontrast.training.option_checks import (
    check_crops,
    check_options,
    check_own_networks,
    first_objective,
    refuse,
    splits_per_forward,
)
from kontrast.training.student import Student as Student
from kontrast.training.student import build_student as build_student

BATCH_NORM = nn.modules.batchnorm._BatchNorm


class Outcome(NamedTuple):
    """The result of a forward: the named terms of the loss, and the rows that the bank stores after the backward."""

    terms: Terms
    bank_rows: Tensor | None


class Learner(nn.Module):
    """The networks, the objective, the bank and the prototypes of a recipe.

    Args:
        recipe: what to build; options that don't fit together are refused.
        channels: of the images.
        images: the number of images in the data set, for objectives that store an estimate per image.
        classes: the number of classes of the images, for supervised training; 0 if they have no labels.
    """

    steps: Tensor
    width: int

    def __init__(self, recipe: Recipe, channels: int = 3, images: int = 2**20, classes: int = 0):
        super().__init__()
        student = build_student(recipe, channels)
        known = {"images": images, "width": student.head.width, "features": student.encoder.width}
        known |= {"classes": classes} if classes else {}
        known |= {"prototypes": recipe.prototypes.count} if recipe.prototypes else {}
        self.objective: Objective = build_objective(recipe, known)
        check_options(recipe, self.objective, classes)
        check_own_networks(recipe, student, channels)
        check_crops(recipe, student.encoder, channels)
        if recipe.training.parallel == "fsdp" and not sharding.is_transformer(student.encoder):
            refuse("training.parallel = 'fsdp'", f"{recipe.encoder.name} is not a transformer: use 'ddp'")
        self.student = with_batch_norm(student, recipe)
        self.width = student.head.width
        self.predictor = None
        if p := recipe.predictor:
            self.predictor = with_batch_norm(networks.predictor(p.name, self.width, **p.arguments), recipe)
        self.teacher = Teacher(self.student) if recipe.teacher else None
        self.student.returns_features = isinstance(self.objective, Sum) and bool(self.objective.on_features())
        self.prototypes, self.teacher_prototypes = None, None
        if c := recipe.prototypes:
            self.prototypes = Prototypes(c.count, self.width, c.kind, c.learn_scale)
            self.teacher_prototypes = Teacher(self.prototypes) if recipe.teacher else None
        self.asymmetric = recipe.teacher is not None and not recipe.teacher.symmetric
        self.bank, self.contents = None, ""
        if recipe.bank is not None:
            self.contents = recipe.bank.contents
            queues = recipe.views.count - self.asymmetric if self.contents == "views" else 0
            self.bank = MemoryBank(recipe.bank.size, self.width, normalize=self.contents != "means", queues=queues)
        self.count = recipe.views.count + (recipe.text is not None)
        self.returns_teacher = recipe.teacher is not None and recipe.teacher.result
        self.stop_gradient, self.joint = recipe.training.stop_gradient, recipe.batch_norm.joint
        self.shuffled = recipe.batch_norm.kind == "split" and recipe.teacher is not None
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._compiled: dict[str, Callable[[Tensor], Tensor]] = {}
        self._norms: dict[str, list[Any]] = {
            n: [m for m in part.modules() if isinstance(m, BATCH_NORM)] for n, part in self.parts()
        }
        self.ramp_end = float(getattr(self.ramped, recipe.objective.ramp)) if recipe.objective.ramp else 0.0
        if recipe.training.accumulate > 1 and has_dropout(self.student):
            refuse("training.accumulate", f"{recipe.encoder.name} has dropout, which differs between its two passes")

    def parts(self) -> list[tuple[str, nn.Module]]:
        """Return the networks by name."""
        named = {"student": self.student, "teacher": self.teacher, "predictor": self.predictor}
        return [(name, part) for name, part in named.items() if part is not None]

    @property
    def ramped(self) -> Objective:
        """The objective that `objective.ramp` belongs to: the first one, if others are added to it."""
        return first_objective(self.objective)

    @property
    def result(self) -> Student:
        """The network that is evaluated and exported: the student, or the teacher if the recipe says so."""
        if self.teacher is None or not self.returns_teacher:
            return self.student
        assert isinstance(self.teacher.module, Student)
        return self.teacher.module

    def freeze(self, stages: int) -> None:
        """Freeze the first stages of the student's encoder and of the teacher's."""
        for student in [self.student, *([self.teacher.module] if self.teacher is not None else [])]:
            assert isinstance(student, Student)
            student.freeze(stages)

    def loss_parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained besides the networks, by name: the prototypes, and the objective's own parameters."""
        found = {n: p for n, p in self.named_parameters() if n.startswith(("objective.", "prototypes."))}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def compile_networks(self, blocks: bool = False) -> None:
        """Compile the networks, whole or block by block; call them by `network`, so that they keep their plain names.

        Each size is compiled separately, since code for any size is slower. What earlier runs of this process compiled
        is dropped: the compiler keeps a limited number of versions of a function, and runs the next one uncompiled.
        """
        torch.compiler.reset()
        compiled: Any = CompiledBlocks if blocks else partial(torch.compile, dynamic=False)
        self._compiled = {n: compiled(part) for n, part in self.parts() if n != "predictor"}
        towers = {"text": self.student.text, "teacher text": self.teacher_text}
        self._compiled |= {n: compiled(part) for n, part in towers.items() if part is not None}

    def network(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return a network by name, compiled if it was."""
        if name in self._compiled:
            return self._compiled[name]
        towers = {"text": self.student.text, "teacher text": self.teacher_text}
        return towers[name] if name in towers else getattr(self, name)  # type: ignore[return-value]

    @property
    def teacher_text(self) -> nn.Module | None:
        """The teacher's text tower, if there is one."""
        return None if self.teacher is None else self.teacher.module.text  # type: ignore[return-value]

    def forward(
        self, views: Tensor, local: Tensor | None = None, momentum: Tensor | None = None, with_loss: bool = True,
        tokens: Tensor | None = None, **of_images: Tensor,
    ) -> Outcome | Tensor:  # fmt: skip
        """Return the terms of the loss, or with `with_loss=False` the queries alone.

        Args:
            views: the global views.
            local: the local crops, if there are any.
            momentum: of the teacher.
            with_loss: whether to return the terms.
            tokens: of a caption of each image, if there is a text tower.
            **of_images: what the objective is given about the images: `indices` and `labels`.

        Shape:
            views [V,B,C,h,w], local crops [L,B,C,l,l], momentum [], tokens [B,tokens], indices and labels [B]; queries
            [V(+1)(+L),B,D].
        """
        if not with_loss:
            return self.predict(self.projections(views, local, tokens))
        keys = self.teacher_keys(views, momentum, tokens=tokens)
        projections = self.projections(views, local, tokens)
        if self.stop_gradient:
            keys = self.own_keys(projections)
        return self.compute_loss(self.predict(projections), keys, **of_images)

    def projections(self, views: Tensor, local: Tensor | None, tokens: Tensor | None = None) -> Tensor:
        """Return the student's projections [V(+1)(+L),B,D] of the query views, the captions and the local crops.

        If a part of the loss is of features, they follow each projection: [V(+L),B,D+F].
        """
        parts = [self.per_view("student", views[:1] if self.asymmetric else views)]
        parts += [] if tokens is None else [self.network("text")(tokens)[None]]
        parts += [] if local is None else [self.per_view("student", local)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def compute_loss(
        self, z: Tensor, keys: Tensor | None, indices: Tensor | None = None, labels: Tensor | None = None
    ) -> Outcome:
        """Return the terms of the loss of queries and keys, and the rows that the bank will store."""
        z, features = z[..., : self.width], z[..., self.width :]
        inputs: OptionalInputs = {
            "keys": keys,
            "bank": None if self.bank is None else self.bank.rows,
            "prototypes": None if self.prototypes is None else self.prototypes(),
            "key_prototypes": None if self.teacher_prototypes is None else self.teacher_prototypes(),
            "indices": indices if self.objective.needs_indices else None,
            "labels": labels if keys is None else None,  # keys have none
            "global_views": self.count if self.objective.takes_global_views and len(z) > self.count else None,
        }
        beside: dict[str, Any] = {"features": features} if self.student.returns_features else {}
        with values_unread():  # the step checks for NaN itself, on the device and on all ranks
            terms = self.objective.terms(z, **inputs, **beside)
        stored = z[: self.count] if keys is None else keys
        return Outcome(terms, None if self.bank is None else self.rows_for_bank(stored))

    def predict(self, projections: Tensor) -> Tensor:
        """Return the queries: projections through the predictor, if there is one."""
        if self.predictor is None:
            return projections
        if not self.student.returns_features:
            return self.per_view("predictor", projections)
        predictions = self.per_view("predictor", projections[..., : self.width])
        return torch.cat([predictions, projections[..., self.width :].to(predictions.dtype)], -1)

    def own_keys(self, projections: Tensor) -> Tensor:
        """Return the student's projections as keys, without gradient."""
        return projections[: self.count, ..., : self.width].detach()

    @torch.no_grad()
    def teacher_keys(
        self, views: Tensor, momentum: Tensor | None, parts: int = 1, tokens: Tensor | None = None
    ) -> Tensor | None:
        """Return the teacher's keys [W(+1),B,D]. The teacher is updated first, as in MoCo's code.

        Args:
            views: [V,B,C,h,w].
            momentum: of the update; None for no update.
            parts: forwards that the images are divided into. If images are shuffled, it is before they are divided:
                otherwise a key would share its batch statistics with the neighbors of its query.
            tokens: [B,tokens], of captions, whose keys are the last.
        """
        if self.teacher is None:
            return None
        if momentum is not None and self.training:
            self.teacher.update(self.student, momentum)
            if self.teacher_prototypes is not None and self.prototypes is not None:
                self.teacher_prototypes.update(self.prototypes, momentum)
        images = views[1:] if self.asymmetric else views
        if tokens is not None:
            of_texts = torch.cat([self.network("teacher text")(part) for part in tokens.chunk(parts)])
            return torch.cat([self.image_keys(images, parts), of_texts[None]])
        return self.image_keys(images, parts)

    def image_keys(self, images: Tensor, parts: int) -> Tensor:
        """Return the teacher's keys [W,B,D] of views of images [W,B,C,h,w]."""
        if not self.shuffled:
            return torch.cat([self.per_view("teacher", part) for part in images.chunk(parts, 1)], 1)
        if self.joint:  # JCL shuffles the keys of all views together
            keys = self.shuffled_keys(images.flatten(0, 1), self.steps, parts, len(images))
            return keys.unflatten(0, images.shape[:2])
        first = self.steps * len(images)
        return torch.stack([self.shuffled_keys(x, first + v, parts) for v, x in enumerate(images)])

    def shuffled_keys(self, images: Tensor, number: Tensor, parts: int, views: int = 1) -> Tensor:
        """Return keys whose batch statistics come from other images than those of their queries (ShuffleBN)."""
        mixed, order = shuffle(images, number, views)
        return unshuffle(torch.cat([self.network("teacher")(part) for part in mixed.chunk(parts)]), order)

    def per_view(self, name: str, images: Tensor) -> Tensor:
        """Pass [V,B,...] through a network, in one forward if possible.

        If each view is to have its own batch statistics, split batch norm separates the views within the forward; other
        batch norms (over ranks) need one forward per view. If statistics are over splits of all views together, a split
        contains every view of its images, like a device with its share of the batch.
        """
        network, norms = self.network(name), self._norms[name]
        if not self.joint and any(not isinstance(norm, SplitBatchNorm) for norm in norms):
            return torch.stack([network(image) for image in images])
        for norm in norms:
            norm.views = 1 if self.joint else len(images)
        splits = getattr(norms[0], "splits", 1) if norms and self.joint else 1
        if splits == 1 or len(images) == 1:
            return network(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        shares = images.unflatten(1, (splits, -1)).transpose(0, 1)
        return network(shares.flatten(0, 2)).unflatten(0, shares.shape[:3]).transpose(0, 1).flatten(1, 2)

    def rows_for_bank(self, keys: Tensor) -> Tensor:
        """Return the rows that the bank stores, from keys [W,B,D] of all ranks: [N,D], or per view [W,N,D].

        They are those of the last view, of all views, or JCL's means, which the bank itself normalizes if they are to
        be `unit-means`.
        """
        unit = torch.nn.functional.normalize(keys.detach().to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
        joined = distributed.gather(unit, dim=1)  # view by view, so that any number of ranks gives the same rows
        if self.contents == "last":
            return joined[-1]
        if self.contents == "views":
            return joined
        return joined.flatten(0, 1) if self.contents == "all" else joined.mean(0)


def with_batch_norm(module: Module, recipe: Recipe) -> Module:
    """Return the module with batch norm that separates splits or views, if the recipe asks for it.

    Synchronized batch norm is added later, in `build_learner`, when the device is known.
    """
    kind, joint = recipe.batch_norm.kind, recipe.batch_norm.joint
    if kind == "split" or (kind == "plain" and not joint):
        return convert_split_batch_norm(module, splits_per_forward(recipe) if kind == "split" else 1)
    return module


def has_dropout(module: nn.Module) -> bool:
    """Return whether a forward in training draws random numbers: dropout of units or of paths."""
    kinds = ("Dropout", "DropPath", "StochasticDepth")
    layers = [m for m in module.modules() if type(m).__name__.startswith(kinds)]
    return any((getattr(m, "p", 0) or getattr(m, "drop_prob", 0) or 0) > 0 for m in layers)


def build_objective(recipe: Recipe, known: Mapping[str, int] = MappingProxyType({})) -> Objective:
    """Return the objective of a recipe, and those that are added to it.

    Args:
        recipe: whose [objective] it is.
        known: arguments that the recipe can't set, because they come from the data or the networks.
    """

    def build(name: str, arguments: Mapping[str, Any], on: str = "projections") -> Objective:
        sizes = {**known, "width": known["features"]} if on == "features" and known else known
        filled_in = {key: sizes[key] for key in OBJECTIVES.arguments(name) if key in sizes}
        return objective(name, **arguments, **filled_in)

    settings = recipe.objective
    first = build(settings.name, settings.arguments)
    if settings.weight == 1 and not settings.plus:
        return first
    added = [{"weight": 1.0, "on": "projections", **entry} for entry in settings.plus]
    names, weights, on = ([entry.pop(key) for entry in added] for key in ("name", "weight", "on"))
    others = [build(name, arguments, where) for name, arguments, where in zip(names, added, on)]
    return Sum([first, *others], [settings.weight, *weights], ["projections", *on])
