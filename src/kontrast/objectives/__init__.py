"""Losses of contrastive representation learning, one file each; they need torch alone.

>>> import torch
>>> from kontrast.objectives import NTXent, objective
>>> NTXent(temperature=0.5)(torch.eye(4), torch.eye(4))
tensor(0.5944)
>>> objective("nt-xent", temperature=0.5)(torch.eye(4), torch.eye(4))
tensor(0.5944)
"""

from kontrast.objectives.align_uniform import AlignUniform
from kontrast.objectives.alignment import Alignment
from kontrast.objectives.arguments import choice, number, positive, switch, weight, whole
from kontrast.objectives.barlow_twins import BarlowTwins
from kontrast.objectives.base import OBJECTIVES, Objective, Terms, objective
from kontrast.objectives.cacr import CACR
from kontrast.objectives.co2 import CO2
from kontrast.objectives.cross_entropy import CrossEntropy
from kontrast.objectives.dcl import DCL
from kontrast.objectives.dclw import DCLW
from kontrast.objectives.decoupled_nt_xent import DecoupledNTXent
from kontrast.objectives.dino import DINO
from kontrast.objectives.hard_negative import HardNegative
from kontrast.objectives.info_nce import InfoNCE
from kontrast.objectives.isogclr import ISogCLR
from kontrast.objectives.jcl import JCL
from kontrast.objectives.koleo import KoLeo
from kontrast.objectives.learned_temperature import LearnedTemperature
from kontrast.objectives.lejepa import LeJEPA
from kontrast.objectives.multi_view_nce import MultiViewNCE
from kontrast.objectives.nnclr import NNCLR
from kontrast.objectives.nt_xent import NTXent
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.siglip import SigLIP
from kontrast.objectives.sim_affinity import SimAffinity
from kontrast.objectives.sim_trace import SimTrace
from kontrast.objectives.sim_whitening import SimWhitening
from kontrast.objectives.sogclr import SogCLR
from kontrast.objectives.sum import Sum
from kontrast.objectives.swav import SwAV
from kontrast.objectives.swd import SWD
from kontrast.objectives.vicreg import VICReg
from kontrast.objectives.w_mse import WMSE
from kontrast.objectives.zero_cl import ZeroCL

__all__ = [
    "CACR", "CO2", "DCL", "DCLW", "DINO", "JCL", "NNCLR", "OBJECTIVES", "SWD", "WMSE", "AlignUniform", "Alignment",
    "BarlowTwins", "CrossEntropy", "DecoupledNTXent", "HardNegative", "ISogCLR", "InfoNCE", "KoLeo", "LeJEPA",
    "LearnedTemperature", "MultiViewNCE", "NTXent", "Objective", "Pairs", "SigLIP", "SimAffinity", "SimTrace",
    "SimWhitening", "SogCLR", "Sum", "SwAV", "Terms", "VICReg", "ZeroCL", "choice", "number", "objective",
    "positive", "switch", "weight", "whole",
]  # fmt: skip
