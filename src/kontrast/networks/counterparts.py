"""The models of timm and torchvision that compute the same features as an encoder, with its tensors.

The ResNets have the parameter names of torchvision and timm, and the ViTs those of timm, so that only torchvision's
ViT needs other names. C channels, F width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kontrast.errors import UsageError
from kontrast.networks.catalog import Encoder
from kontrast.networks.resnet import ResNet
from kontrast.networks.vit import ViT

RESNETS = {"resnet-18": "resnet18", "resnet-34": "resnet34", "resnet-50": "resnet50", "resnet-101": "resnet101"}
VITS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit-tiny": ("vit_tiny_patch16_224", {}),
    "vit-small": ("vit_small_patch16_224", {}),
    "vit-small-moco": ("vit_small_patch16_224", {"num_heads": 12}),
    "vit-base": ("vit_base_patch16_224", {}),
}
"""timm's name of each ViT, and the arguments in which it differs; size and patch are arguments too."""
TORCHVISION_VITS = {("vit-base", 16): "vit_b_16", ("vit-base", 32): "vit_b_32"}
TORCHVISION_NAMES = {
    "cls_token": "class_token", "pos_embed": "encoder.pos_embedding", "patch_embed.proj": "conv_proj",
    "blocks": "encoder.layers", "norm1": "ln_1", "norm2": "ln_2", "attn.qkv.": "self_attention.in_proj_",
    "attn.proj": "self_attention.out_proj", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3",
}  # fmt: skip
"""Parts of the names of a ViT's tensors, and what torchvision calls them; its blocks have names besides numbers."""


@dataclass(frozen=True)
class Counterpart:
    """A model of another library that computes an encoder's features.

    Attributes:
        library: "timm" or "torchvision".
        name: the model's name there.
        arguments: what it is built with, besides `num_classes=0` (timm).
        classifier: the name of its classifier, which the encoder lacks.
        first: the name of its first convolution.
        pooling: "avg", or "token" for a class token.
        fixed_size: whether it only takes images of the size that it is built for.
    """

    library: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    classifier: str = "fc"
    first: str = "conv1"
    pooling: str = "avg"
    fixed_size: bool = False

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoder's state dict under the names of the model."""
        if self.library == "torchvision" and "cls_token" in state:
            return {torchvision_name(name): tensor for name, tensor in state.items()}
        return dict(state)


def counterpart(library: str, name: str, arguments: Mapping[str, Any], encoder: Encoder) -> Counterpart:
    """Return the model of a library that an encoder is equal to; raise if there is none.

    Args:
        library: "timm" or "torchvision".
        name: the encoder's name in the recipe.
        arguments: its further arguments in the recipe.
        encoder: the encoder.
    """
    found = find(library, name, arguments, encoder)
    if isinstance(found, Counterpart):
        return found
    others = [
        other for other in ("timm", "torchvision") if isinstance(find(other, name, arguments, encoder), Counterpart)
    ]
    instead = ", ".join([*others, "hub", "safetensors"])
    raise UsageError(f"{name} can't be exported as a model of {library}: {found}; formats for it: {instead} or onnx")


def find(library: str, name: str, arguments: Mapping[str, Any], encoder: Encoder) -> Counterpart | str:
    """Return the equal model of a library, or the reason why there is none."""
    origin, _, model = name.partition(":")
    if origin == library:
        return external_counterpart(library, model, arguments, encoder)
    if type(encoder) is ResNet and name in RESNETS:
        return resnet_counterpart(library, name, encoder)
    if type(encoder) is ViT and name in VITS:
        return vit_counterpart(library, name, encoder)
    return f"{library} has no model like it"


def resnet_counterpart(library: str, name: str, encoder: Encoder) -> Counterpart | str:
    """Return the ResNet of a library. Only ImageNet's stem is the same there."""
    if encoder.get_parameter("conv1.weight").shape[2:] != (7, 7):
        return f"{library}'s {RESNETS[name]} has the other stem; train with encoder.stem=imagenet"
    if library == "torchvision" and encoder.channels != 3:
        return f"torchvision's {RESNETS[name]} takes 3 channels, not {encoder.channels}"
    return Counterpart(library, RESNETS[name], in_chans(encoder) if library == "timm" else {})


def vit_counterpart(library: str, name: str, encoder: Encoder) -> Counterpart | str:
    """Return the ViT of a library, with the encoder's size and patches."""
    patch: Any = encoder.patch
    arguments: dict[str, Any]
    if library == "timm":
        known, own = VITS[name]
        arguments = {"img_size": encoder.size, "patch_size": patch, **own, **in_chans(encoder)}
        return Counterpart(library, known, arguments, "head", "patch_embed.proj", "token", fixed_size=True)
    if (name, patch) not in TORCHVISION_VITS or encoder.channels != 3:
        given = f"this one is {name} with {patch} px and {encoder.channels} channels"
        return f"of our ViTs, it only has vit-base with patches of 16 or 32 px and 3 channels; {given}"
    known, arguments = TORCHVISION_VITS[name, patch], {"image_size": encoder.size}
    return Counterpart(library, known, arguments, "heads.head", "conv_proj", "token", fixed_size=True)


def external_counterpart(library: str, model: str, arguments: Mapping[str, Any], encoder: Encoder) -> Counterpart | str:
    """Return the model that the encoder itself is, an encoder of that library."""
    built: dict[str, Any] = dict(getattr(encoder, "built_with", arguments))
    first = next((name for name, part in encoder.named_modules() if isinstance(part, nn.Conv2d)), "")
    if library == "torchvision":
        if encoder.channels != 3:
            return f"torchvision's models take 3 channels, not {encoder.channels}"
        removed = [name for name, part in encoder.named_modules() if isinstance(part, nn.Identity)]
        return Counterpart(library, model, built, removed[-1], first, fixed_size="image_size" in built)
    config: Any = encoder.pretrained_cfg
    known = {"classifier": config.get("classifier") or "fc", "first": config.get("first_conv") or first}
    pooling = getattr(encoder, "global_pool", None)
    named = {"pooling": pooling} if isinstance(pooling, str) else {}
    return Counterpart(library, model.partition(".")[0], built, fixed_size="img_size" in built, **known, **named)


def in_chans(encoder: Encoder) -> dict[str, int]:
    """Return timm's argument for other numbers of channels than 3."""
    return {} if encoder.channels == 3 else {"in_chans": encoder.channels}


def torchvision_name(name: str) -> str:
    """Return torchvision's name of a tensor of a ViT.

    Example:
        >>> torchvision_name("blocks.3.attn.qkv.weight")
        'encoder.layers.encoder_layer_3.self_attention.in_proj_weight'
    """
    if name.startswith("norm."):
        return f"encoder.ln{name.removeprefix('norm')}"
    for old, new in TORCHVISION_NAMES.items():
        name = name.replace(old, new)
    return name.replace("encoder.layers.", "encoder.layers.encoder_layer_")
