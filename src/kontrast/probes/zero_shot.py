"""Zero-shot classification: an image belongs to the class whose name, put into templates, is nearest as a text.

N images, C classes, P templates, D width of the projections, which are unit vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.errors import DataError, UsageError
from kontrast.probes.result import ProbeResult, check_labels, predictions, result
from kontrast.registry import nearest

BLURS = ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")
DIGIT_COLORS = ("white", "gray", "black", "red", "yellow", "green", "blue", "purple")
TEMPLATES: dict[str, tuple[str, ...]] = {
    "name": ("{}",),
    "photo": ("a photo of a {}.",),
    "clip-7": (
        "itap of a {}.", "a bad photo of the {}.", "a origami {}.", "a photo of the large {}.",
        "a {} in a video game.", "art of the {}.", "a photo of the small {}.",
    ),
    "cifar-18": tuple(
        f"{one}."
        for article in ("a", "the")
        for one in (
            *(f"a {blur}photo of {article} {{}}" for blur in BLURS),
            *(f"a photo of {article} {size} {{}}" for size in ("small", "big")),
        )
    ),
    "digits": tuple(
        f"a {size} {color} {{}} at the {row} {side}"
        for size in ("small", "large")
        for color in DIGIT_COLORS
        for row in ("upper", "lower")
        for side in ("left", "right")
    ),
}  # fmt: skip
"""Sets of templates: CLIP's seven that are best for ImageNet, its eighteen for CIFAR, those of the embedded digits."""


def templates_named(name: str | Sequence[str]) -> tuple[str, ...]:
    """Return templates by the name of their set, or one template or several of your own, each with {}.

    Example:
        >>> templates_named("photo"), templates_named("a sketch of a {}")
        (('a photo of a {}.',), ('a sketch of a {}',))
    """
    own = (name,) if isinstance(name, str) else tuple(name)
    if isinstance(name, str) and name in TEMPLATES:
        return TEMPLATES[name]
    for one in own or ("",):
        if one.count("{}") != 1:
            raise UsageError(f"templates {one!r}: give a template with one {{}}, or a name; {nearest(one, TEMPLATES)}")
    return own


def class_vectors(encode: Callable[[list[str]], Tensor], classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return one unit vector per class [C,D]: the mean over templates of the unit vectors of the texts, as a unit.

    Args:
        encode: maps T texts to projections [T,D].
        classes: names of the classes.
        templates: texts with {} in place of the name.

    Example:
        >>> lengths = lambda texts: torch.eye(9)[[len(text) for text in texts]][:, 3:6:2]
        >>> class_vectors(lengths, ["cat", "horse"], ["{}"])
        tensor([[1., 0.],
                [0., 1.]])
    """
    texts = [template.replace("{}", name.replace("_", " ")) for name in classes for template in templates]
    vectors = normalize(encode(texts).float(), dim=-1).unflatten(0, (len(classes), len(templates)))
    return normalize(vectors.mean(1), dim=-1)


def zero_shot(images: Tensor, labels: Tensor, classes: Tensor, seed: int = 0) -> ProbeResult:
    """Classify images by the nearest class vector.

    Args:
        images: projections of the images.
        labels: the class of each image.
        classes: the vectors of the classes, as `class_vectors` returns them.
        seed: of the interval.

    Shape:
        images [N,D], labels int64 [N], classes [C,D].

    Example:
        >>> zero_shot(torch.eye(3), torch.tensor([0, 1, 1]), torch.eye(3)).accuracy
        0.6666666666666666
    """
    labels = check_labels("test", len(images), labels)
    if int(labels.max()) >= len(classes):
        raise DataError(f"the test images have the label {int(labels.max())}, and there are {len(classes)} class names")
    if not bool(torch.isfinite(images).all()):
        raise DataError("projections of the images are not finite")
    scores = normalize(images.float(), dim=-1) @ classes.float().T
    return result("zero-shot", predictions(scores.cpu(), labels), {"classes": len(classes)}, seed)
