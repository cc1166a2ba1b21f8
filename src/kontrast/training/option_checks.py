"""Checks of a recipe's options, which are refused with the reason if they don't fit each other."""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.config.recipe import Recipe
from kontrast.errors import UsageError
from kontrast.networks.catalog import Encoder
from kontrast.objectives import Objective, Sum
from kontrast.registry import nearest
from kontrast.training.student import Student


def refuse(option: str, reason: str) -> None:
    raise UsageError(f"{option} can't be used here: {reason}")


def first_objective(loss: Objective) -> Objective:
    return loss.parts[0] if isinstance(loss, Sum) else loss


def check_options(recipe: Recipe, loss: Objective, classes: int | None = None) -> None:
    """Raise an error with the reason if options don't fit the objective, each other, or the classes, if known."""
    name, views, ramp = recipe.objective.name, recipe.views, recipe.objective.ramp
    if recipe.training.labels and (classes == 0 or not loss.takes_labels):
        refuse("training.labels", "the images have no labels" if classes == 0 else f"{name} takes no labels")
    if recipe.training.labels and (recipe.teacher or recipe.bank or recipe.training.stop_gradient):
        refuse("training.labels", "keys and banks have no labels: train without teacher, bank and stop-gradient")
    if recipe.prototypes is not None and not loss.needs_prototypes:
        refuse("prototypes", f"{name} has none")
    if loss.needs_prototypes and recipe.prototypes is None:
        refuse(f"objective.name = {name!r}", "it needs prototypes: set prototypes.count")
    if loss.needs_labels and not recipe.training.labels:
        refuse(f"objective.name = {name!r}", "it needs labels: set training.labels=true")
    if loss.needs_bank and recipe.bank is None:
        refuse(f"objective.name = {name!r}", "it needs a bank: set bank.size")
    if recipe.bank is not None and (recipe.bank.contents == "views") != loss.bank_per_view:
        wanted = "one queue per view: set bank.contents='views'" if loss.bank_per_view else "one bank for all views"
        refuse(f"bank.contents = {recipe.bank.contents!r}", f"{name} has {wanted}")
    if recipe.teacher is not None and recipe.training.stop_gradient:
        refuse("training.stop_gradient", "the keys of a teacher have no gradient anyway")
    if recipe.bank is not None and not loss.takes_bank:
        refuse("a bank", f"{name} has no form with a memory bank")
    if views.count < 2 and recipe.text is None:
        refuse(f"views.count = {views.count}", "views.count must be at least 2")
    if views.local_count and recipe.teacher is not None and not recipe.teacher.symmetric:
        refuse("views.local_count", "local crops need a symmetric teacher: set teacher.symmetric=true")
    if isinstance(loss, Sum) and loss.on_features():
        if recipe.teacher is not None and not recipe.teacher.symmetric:
            refuse("objective.plus on features", "it needs the features of two views: set teacher.symmetric=true")
        if recipe.text is not None:
            refuse("objective.plus on features", "with [text] the two towers have features of different kinds")
    check_batch(recipe)
    check_text(recipe)
    if ramp:
        settable = [
            n for n, p in vars(type(first_objective(loss))).items() if isinstance(p, property) and p.fset is not None
        ]
        if ramp not in settable:
            refuse(f"objective.ramp = {ramp!r}", f"in {name}, {nearest(ramp, settable)}")


def check_text(recipe: Recipe) -> None:
    """Raise if options don't fit a text tower."""
    if recipe.text is None:
        return
    if recipe.training.labels:
        refuse("training.labels", "with [text] the labels are those of equal captions")
    if recipe.bank is not None:
        refuse("a bank", "with [text] its rows would be of images or of texts, and the queries are both")
    if recipe.teacher is not None and not recipe.teacher.symmetric:
        refuse("teacher.symmetric = false", "with [text] the student's text tower would not be trained: give true")
    if recipe.training.parallel == "fsdp":
        refuse("training.parallel = 'fsdp'", "with [text] the towers are not sharded: use 'ddp'")


def check_own_networks(recipe: Recipe, student: Student, channels: int) -> None:
    """Try an encoder or head of the user on two images, and raise if it fails or returns another width than it says."""
    if all(type(network).__module__.startswith("kontrast.") for network in (student.encoder, student.head)):
        return
    x, mode = torch.zeros(2, channels, recipe.views.size, recipe.views.size), student.training
    student.eval()
    for kind, network, settings in (("encoder", student.encoder, recipe.encoder), ("head", student.head, recipe.head)):
        name, given = f"{kind} {settings.name!r}", list(x.shape)
        try:
            with torch.no_grad():
                x = network(x)
        except Exception as error:  # own code may raise anything
            if "alloc" in str(error).lower():  # out of memory, which has its own error
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UsageError(f"{name} fails on a batch {given}: {reason} (--debug shows the line)") from error
        found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        if found != [2, network.width]:
            raise UsageError(f"{name} returns {found} for a batch {given}: its width says [2, {network.width}]")
    student.train(mode)


def check_crops(recipe: Recipe, encoder: Encoder, channels: int) -> None:
    """Raise if the encoder can't process local crops: some encoders accept only the size that they were built for."""
    size = recipe.views.local_size
    if not recipe.views.local_count or size < 1:
        return
    try:
        with torch.no_grad():
            encoder.eval()(torch.zeros(1, channels, size, size))
    except (RuntimeError, ValueError, AssertionError) as error:
        if "alloc" in str(error).lower() or "overflowed" in str(error):  # out of memory, which has its own error
            raise
        reason = " ".join(str(error).split())
        refuse(f"views.local_size = {size}", f"{recipe.encoder.name} can't process this size ({reason})")
    encoder.train()


def check_batch(recipe: Recipe) -> None:
    """Raise if the batch can't be divided into the recipe's parts and splits."""
    batch, parts, ranks = recipe.training.batch, recipe.training.accumulate, distributed.world()
    if batch % (parts * ranks):
        refuse(f"training.accumulate = {parts}", f"{parts} x {ranks} ranks must divide the batch {batch}")
    if recipe.batch_norm.kind != "split":
        return
    option, forwards = f"batch_norm.splits = {recipe.batch_norm.splits}", ranks * parts
    if recipe.batch_norm.splits % forwards:  # rounded, the splits would have other sizes than those asked for
        refuse(option, f"{ranks} ranks x {parts} accumulated parts must divide it; give a multiple of {forwards}")
    images, splits = batch // forwards, splits_per_forward(recipe)
    if images % splits:
        refuse(option, f"{splits} must divide the {images} of one forward")


def splits_per_forward(recipe: Recipe) -> int:
    """Return the number of splits in one forward of one rank.

    The recipe's splits are those of the whole batch and stand for the devices of a paper. Ranks and accumulated parts
    share them, so that the number of images per split stays the same.
    """
    return recipe.batch_norm.splits // (distributed.world() * recipe.training.accumulate)
