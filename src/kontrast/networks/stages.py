"""Stages of an encoder from the input to the output, the first of which may be frozen."""

from __future__ import annotations

from torch import nn

from kontrast.errors import UsageError

LISTS = (nn.Sequential, nn.ModuleList)


def stages_of(encoder: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of each stage.

    A stage is a child of the encoder that has parameters, with the norms that follow it: of a ResNet the stem and each
    group of blocks. If only one child is a sequence (the blocks of a transformer), each of its modules is a stage.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> [len(stage) for stage in stages_of(network)]
        [2, 1]
    """
    children = [child for child in encoder.children() if _has_state(child)]
    if sum(isinstance(child, LISTS) for child in children) == 1:
        children = [m for child in children for m in (child if isinstance(child, LISTS) else [child]) if _has_state(m)]
    stages: list[list[nn.Module]] = []
    for child in children:
        is_norm = all(p.ndim < 2 for p in child.parameters())
        if is_norm and stages:
            stages[-1].append(child)
        else:
            stages.append([child])
    return stages


def freeze_stages(encoder: nn.Module, count: int) -> list[nn.Module]:
    """Stop the training of the first stages, and return their modules, which are to stay in eval mode.

    Parameters of the encoder itself, such as a class token, belong to the first stage.

    Args:
        encoder: the network.
        count: how many stages.
    """
    stages = stages_of(encoder)
    if not 0 <= count < len(stages):
        most = f"{type(encoder).__name__} has {len(stages)} stages, of which at most {len(stages) - 1} can be frozen"
        raise UsageError(f"start.frozen_stages = {count}: {most}")
    if count:
        for parameter in encoder.parameters(recurse=False):
            parameter.requires_grad_(False)
    return [module.requires_grad_(False).eval() for stage in stages[:count] for module in stage]


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
