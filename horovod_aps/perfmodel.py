"""The performance model under the name that people type; it lives in `horovod_aps.tools.perfmodel`."""

from horovod_aps.tools.perfmodel import (
    ALLREDUCES,
    GBIT,
    Calibration,
    KernelRates,
    Machine,
    Network,
    Prediction,
    break_even_bandwidth,
    load_calibration,
    paying_bandwidths,
    predict_exchange,
    predict_ring,
    save_calibration,
    scaling_efficiency,
)

__all__ = [
    "ALLREDUCES",
    "GBIT",
    "Calibration",
    "KernelRates",
    "Machine",
    "Network",
    "Prediction",
    "break_even_bandwidth",
    "load_calibration",
    "paying_bandwidths",
    "predict_exchange",
    "predict_ring",
    "save_calibration",
    "scaling_efficiency",
]
