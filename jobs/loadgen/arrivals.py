"""When requests are due in an open loop: pure functions from a rate to seconds after the start."""

from collections.abc import Sequence

import numpy as np

KINDS = ("poisson", "constant", "gamma", "ramp")


def offsets(kind: str, *, count: int, rate: float, seed: Sequence[int], burstiness: float = 1.0) -> list[float]:
    """`count` due times in rising order, at `rate` requests/s on average.

    constant: evenly spaced. poisson: independent exponential gaps. gamma: gaps of shape `burstiness` and the same
    mean, so below 1 they come in bursts and above 1 ever more evenly (1 is poisson; the name is vLLM's). ramp: from
    nothing to twice `rate`, in a straight line.
    """
    if kind == "constant":
        return [i / rate for i in range(count)]
    if kind == "ramp":  # n(t) = rate * t^2 / T with T = count / rate: the rate grows to twice the mean
        return [count / rate * (i / count) ** 0.5 for i in range(count)]
    shape = burstiness if kind == "gamma" else 1.0
    gaps = np.random.default_rng(list(seed)).gamma(shape, 1 / (rate * shape), size=count)
    gaps[0] = 0.0  # the first is due at once
    times: list[float] = np.cumsum(gaps).tolist()
    return times
