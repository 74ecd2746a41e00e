"""Decorators of `autograd.Function` under autocast, for the device that the official kernels run on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["custom_amp_decorator", "custom_bwd", "custom_fwd"]


def custom_amp_decorator(dec: Callable[..., Any], cuda_amp_deprecated: bool) -> Callable[..., Any]:
    return partial(dec, device_type="cuda") if cuda_amp_deprecated else dec


custom_fwd = custom_amp_decorator(torch.amp.custom_fwd, True)
custom_bwd = custom_amp_decorator(torch.amp.custom_bwd, True)
