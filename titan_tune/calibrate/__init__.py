"""Measured speeds of this machine for the step-time model: matmuls, attention, copies, launches, collectives.

``measure`` starts one process a GPU under the warden (``child``, the only part that imports torch); ``result`` is
what it writes, ``rates`` condenses that, ``store`` keeps it under the user's cache folder by the machine's
fingerprint and gives it to the clusters that commands ask about.
"""

from titan_tune.calibrate.measure import CalibrationOptions, measure
from titan_tune.calibrate.rates import rates_of
from titan_tune.calibrate.result import Calibration, Fingerprint
from titan_tune.calibrate.store import cache_path, calibrated, load, local_fingerprint, save

__all__ = [
    "Calibration",
    "CalibrationOptions",
    "Fingerprint",
    "cache_path",
    "calibrated",
    "load",
    "local_fingerprint",
    "measure",
    "rates_of",
    "save",
]
