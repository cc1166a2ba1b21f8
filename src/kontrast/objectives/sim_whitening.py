"""N images of all ranks, D width.  z [V,B,D] and keys [W,B,D], whitened together."""

from __future__ import annotations

from kontrast.objectives.arguments import choice, optional_weight
from kontrast.objectives.base import OBJECTIVES
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.positives import unit
from kontrast.objectives.sim_affinity import SimAffinity


@OBJECTIVES.register("sim-whitening")
class SimWhitening(SimAffinity):
    r"""SimAffinity of whitened features (UniCLR, equations 2 and 6).

        y = Sigma^(-1/2) (z - mu), of unit length;   A = Y Y'^T / tau;   loss as SimAffinity's

    mu and Sigma are of all views (and keys) together. Sigma has a relative ridge: (1 - ridge) Sigma + ridge tr(Sigma)/D
    I, 1e-3 where None. `variant="mocov3"` is the released code: unit length before whitening and not after, with keys
    mu and Sigma of each query view and key view, Sigma + ridge I (0.01 where None), A divided by N. Table 1 has
    temperature 0.5, table 2 none, which is 1.

    Reference: Li et al., A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix, 2022.
    """

    paper = "UniCLR, equations 2 and 6"
    takes_bank = False
    no_bank = "the rows of a bank are not whitened with the batch"

    def __init__(
        self,
        temperature: float = 0.5,
        symmetry_weight: float = 0.01,
        ridge: float | None = None,
        *,
        variant: str = "paper",
        symmetric: bool = False,
        symmetry_on_scaled: bool = True,
        normalize_by_n: bool = False,
    ):
        options = {"symmetry_on_scaled": symmetry_on_scaled, "normalize_by_n": normalize_by_n}
        super().__init__(temperature, symmetry_weight, symmetric=symmetric, **options)
        self.ridge = optional_weight("ridge", ridge)
        self.variant = choice("variant", variant, ("paper", "mocov3"))

    def scale(self, pairs: Pairs) -> float:
        return 1 / (self.temperature * (pairs.N if self.variant == "mocov3" else 1))

    def pairs(self, inputs: Inputs) -> Pairs:
        code = self.variant == "mocov3"
        ridge = self.ridge if self.ridge is not None else (0.01 if code else 1e-3)
        pairs = Pairs(inputs, normalize=code).whitened(ridge, absolute=code, by_link=code)
        if not code:
            # A row at the mean has no direction: under 1e-6 it counts as zero, other whitened rows are near sqrt(D).
            pairs.z, pairs.k = unit(pairs.z, eps=1e-6), unit(pairs.k, eps=1e-6)
        return pairs
