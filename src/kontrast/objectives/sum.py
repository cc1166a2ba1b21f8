"""A weighted sum of objectives.  V views, B images, D width.  z [V,B,D], rows [V,B]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from kontrast.objectives.arguments import choice, fixed, weight
from kontrast.objectives.base import OBJECTIVES, USES, Objective, Terms, pad_views
from kontrast.objectives.inputs import OptionalInputs

OF_IMAGES = ("labels", "indices", "global_views")
"""The inputs that say something about images and views, whatever rows they have."""


class Sum(Objective):
    """A weighted sum of objectives, for example of DINO and KoLeo.

    Its terms are those of the first objective, and the loss of each further one under its name. Each objective is given
    the inputs that it uses.

    Args:
        parts: the objectives.
        weights: one number per objective; default: 1 for each.
        on: "projections" or "features" per objective: those on features take the encoder's features of the same views
            in place of z, given as `features=`, and no keys, as DINOv2's KoLeo does. Default: projections.

    Shape:
        as those of its parts, and features [V,B,F]; the loss is a scalar, `rows` [V,B] if every part has rows.

    Example:
        >>> from kontrast.objectives import NTXent, Sum, VICReg
        >>> loss = Sum([NTXent(), VICReg()], weights=[1.0, 0.1])
        >>> list(loss.terms(torch.randn(2, 8, 4)))
        ['attraction', 'repulsion', 'vicreg']
    """

    parts: Any

    def __init__(
        self, parts: Sequence[Objective], weights: Sequence[float] | None = None, on: Sequence[str] | None = None
    ):  # fmt: skip
        weights = [1.0] * len(parts) if weights is None else list(weights)
        if not parts or len(weights) != len(parts) or not all(isinstance(part, Objective) for part in parts):
            raise ValueError(f"Sum: give objectives and one weight for each, not {len(parts)} and {len(weights)}")
        super().__init__(normalize=parts[0].normalize, reduction=parts[0].reduction)
        self.parts = nn.ModuleList(parts)
        self.weights = [fixed("weight", weight("weight", given)) for given in weights]
        self.on = [choice("on", where, ("projections", "features")) for where in on or ["projections"] * len(parts)]
        if len(self.on) != len(parts):
            raise ValueError(f"Sum: give one on= for each objective, not {len(self.on)} for {len(parts)}")
        if any(part.needs_bank or part.needs_prototypes for part in self.on_features()):
            raise ValueError("Sum: an objective with a bank or prototypes can't be on features, which have neither")
        for attribute in [name for name in vars(Objective) if name.startswith(("takes_", "needs_"))]:
            setattr(self, attribute, any(getattr(part, attribute) for part in parts))
        queues = {part.bank_per_view for part in parts if part.takes_bank}
        if len(queues) > 1:
            raise ValueError("Sum: some objectives take one bank and others a queue per view; no bank serves both")
        self.bank_per_view = True in queues

    def names(self) -> list[str]:
        """Return the registered name of each part, or that of its class; a name that repeats gets a number."""
        registered = {kind: name for name, kind in OBJECTIVES.items()}
        plain = [registered.get(type(part), type(part).__name__) for part in self.parts]
        earlier = [plain[:n].count(name) for n, name in enumerate(plain)]
        return [f"{name}-{count + 1}" if count else name for name, count in zip(plain, earlier)]

    def forward(
        self, z: Tensor, z2: Tensor | None = None, *, features: Tensor | None = None, **given: Unpack[OptionalInputs]
    ) -> Tensor:  # fmt: skip
        return self.add([part(*of, **used) for part, of, used in self.inputs_of_parts(z, z2, features, given)])

    def terms(
        self, z: Tensor, z2: Tensor | None = None, *, features: Tensor | None = None, **given: Unpack[OptionalInputs]
    ) -> Terms:  # fmt: skip
        found = [part.terms(*of, **used) for part, of, used in self.inputs_of_parts(z, z2, features, given)]
        terms = Terms(**{name: self.weights[0] * term for name, term in found[0].items()})
        further = zip(self.names()[1:], self.weights[1:], found[1:])
        return Terms(**terms, **{name: weight * part.total for name, weight, part in further})

    def rows(
        self, z: Tensor, z2: Tensor | None = None, *, features: Tensor | None = None, **given: Unpack[OptionalInputs]
    ) -> Tensor:  # fmt: skip
        found = [part.rows(*of, **used) for part, of, used in self.inputs_of_parts(z, z2, features, given)]
        return self.add(pad_views(found))

    def on_features(self) -> list[Objective]:
        return [part for part, where in zip(self.parts, self.on) if where == "features"]

    def inputs_of_parts(
        self, z: Tensor, z2: Tensor | None, features: Tensor | None, given: OptionalInputs
    ) -> Iterator[tuple[Objective, tuple[Tensor, Tensor | None], Any]]:
        """Yield each part with its rows and its further inputs."""
        if (features is None) != (not self.on_features()):
            raise ValueError(f"Sum needs features= if a part is on features, and takes none otherwise: on={self.on}")
        for part, where in zip(self.parts, self.on):
            used = self.used_by(part, given)
            if where == "features" and features is not None:
                yield part, (features, None), {name: x for name, x in used.items() if name in OF_IMAGES}
            else:
                yield part, (z, z2), used

    def add(self, values: list[Tensor]) -> Tensor:
        return torch.stack([weight * value for weight, value in zip(self.weights, values)]).sum(0)

    def used_by(self, part: Objective, given: OptionalInputs) -> Any:
        """Return the inputs that a part uses; one that no part uses goes to all of them, and they refuse it."""
        unused = [name for name, use in USES.items() if not getattr(self, use)]
        return {n: x for n, x in given.items() if n not in USES or n in unused or getattr(part, USES[n])}

    def extra_repr(self) -> str:
        return f"weights={self.weights}, on={self.on}"
