"""Compile the blocks of a network instead of the whole: equal blocks share their code, so that training starts sooner.

A ResNet-50 has 16 blocks of 8 kinds, a vision transformer 12 of one kind. What the compiler made is kept on disk.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from kontrast.data.cache_folder import cache_home
from kontrast.errors import EnvironmentFault

LISTS = (nn.Sequential, nn.ModuleList)
KINDS = 64
"""The most versions of one function: each kind of block, size of views and use (with and without gradient) is one."""


class CompiledBlocks:
    """A network whose blocks are compiled when it is called like this; called by itself, it is as it was.

    Args:
        network: an encoder, or an encoder with its head.

    Shape:
        Those of the network.
    """

    def __init__(self, network: nn.Module):
        import torch._dynamo

        config: Any = torch._dynamo.config
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        setattr(config, name, max(getattr(config, name), KINDS))
        self.network = network
        self.compiled = [
            (owner, method, torch.compile(getattr(owner, method), dynamic=False)) for owner, method in regions(network)
        ]

    def __call__(self, images: Tensor) -> Tensor:
        with self.in_place():
            output: Tensor = self.network(images)
        return output

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules call their compiled methods."""
        try:
            for owner, method, compiled in self.compiled:
                vars(owner)[method] = compiled
            yield
        finally:
            for owner, method, _ in self.compiled:
                vars(owner).pop(method, None)


def regions(network: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return what is compiled by itself, as modules and names of their methods.

    These are the modules of the outermost sequences in which at least one class appears twice in the network, the stem
    of a network that has a method of that name, and the head beside the encoder.
    """
    blocks: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, LISTS) and len(child) and all(type(one) is type(child[0]) for one in child):
                is_block = any(True for _ in child[0].children()) and not isinstance(child[0], LISTS)
                blocks.extend(child if is_block else ())
                if is_block:
                    continue
            search(child)

    search(network)
    stems = [m for m in network.modules() if callable(getattr(type(m), "stem", None))]
    found = [(stem, "stem") for stem in stems] + [(block, "forward") for block in blocks]
    head = getattr(network, "head", None)
    if isinstance(head, nn.Module) and head is not network:
        found.append((head, "forward"))
    return found or [(network, "forward")]


def keep_compiled_code(place: Callable[[], Any] = cache_home) -> None:
    """Let torch's compiler keep what it makes in kontrast's cache, where the next run finds it, also after a restart.

    Without this it is in the system's temporary folder. The variables of torch and Triton have precedence.
    """
    with contextlib.suppress(EnvironmentFault, OSError):  # without this cache, training only starts later
        home = place() / "compiled"
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))
        os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
        os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
