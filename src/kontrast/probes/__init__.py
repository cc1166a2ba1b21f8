"""What a frozen encoder can do: every probe takes features [N,F] and labels [N] and returns a ProbeResult."""

from kontrast.probes.features import extract_features
from kontrast.probes.few import few_per_class, few_shot, fine_tune
from kontrast.probes.linear import PROTOCOLS, LinearProtocol, linear
from kontrast.probes.neighbours import knn, nearest_rows
from kontrast.probes.regression import logistic
from kontrast.probes.result import ProbeResult

__all__ = [
    "PROTOCOLS",
    "LinearProtocol",
    "ProbeResult",
    "extract_features",
    "few_per_class",
    "few_shot",
    "fine_tune",
    "knn",
    "linear",
    "logistic",
    "nearest_rows",
]
