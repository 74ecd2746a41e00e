"""Operations. Whoever imports one has the kernels too, which register behind them."""

import mambakit.kernels.cpu
import mambakit.kernels.triton  # noqa: F401
