"""Compute gradients per environment, and masked gradients, from losses or from a model and batches."""

from sandmask.gradients._backward import backward
from sandmask.gradients._environments import environment_gradients, environment_moments, set_gradients
from sandmask.gradients._one_pass import ApartPass, OnePass
from sandmask.gradients._recording import Recording, record
from sandmask.gradients._report import MaskReport, MaskSummary
from sandmask.gradients._tape import Tape, UnsupportedError
from sandmask.gradients._validator import Leak, find_leaks, freeze_batchnorm

__all__ = [
    "ApartPass",
    "Leak",
    "MaskReport",
    "MaskSummary",
    "OnePass",
    "Recording",
    "Tape",
    "UnsupportedError",
    "backward",
    "environment_gradients",
    "environment_moments",
    "find_leaks",
    "freeze_batchnorm",
    "record",
    "set_gradients",
]
