"""Acrobot as a kernel: Gymnasium's equations in Gymnasium's order and precision.

Sine and cosine of small float32 angles equal NumPy's bit for bit: on processors with fused
multiply-add, NumPy evaluates the polynomials below, which differ from the rounded float64 result in
the last bit for a few arguments in a hundred.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from steadyrl.core.jit import jit
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.pcg64 import uniform
from steadyrl.envs.kernels.state import NEEDS_RESET, Outcome, Simulation, begin_episode, record_step

F32 = np.float32
COS = tuple(map(F32, map(float.fromhex, ("0x1.98e616p-16", "-0x1.6c06dcp-10", "0x1.55553cp-5"))))
SIN = tuple(map(F32, map(float.fromhex, ("0x1.7d3bbcp-19", "-0x1.a06bbap-13", "0x1.11119ap-7"))))
COS_2, SIN_3 = F32(-0.5), F32(float.fromhex("-0x1.555556p-3"))
ONE = F32(1.0)


def _declare(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


# In compiled code: fused multiply-add a·b + c.
fused: Any = intrinsic(_declare)


@jit
def small_cos(angle: Any) -> Any:
    """Return the cosine of an angle between ±π/4 in float32."""
    square = angle * angle
    value = fused(fused(COS[0], square, COS[1]), square, COS[2])
    return fused(fused(value, square, COS_2), square, ONE)


@jit
def small_sin(angle: Any) -> Any:
    """Return the sine of an angle between ±π/4 in float32."""
    square = angle * angle
    value = fused(fused(SIN[0], square, SIN[1]), square, SIN[2])
    return fused(F32(fused(value, square, SIN_3) * square), angle, angle)


GRAVITY, SECONDS = 9.8, 0.2
COM, INERTIA = 0.5, 1.0  # both links are alike: length and mass 1
FASTEST_1, FASTEST_2 = 4 * math.pi, 9 * math.pi
SQUARE = 0  # the constant
# `_wrapped` subtracts 2π repeatedly, which would not end for huge angles.
RANGES = ((-math.pi, math.pi),) * 2 + ((-FASTEST_1, FASTEST_1), (-FASTEST_2, FASTEST_2))


def acrobot() -> Kernel:
    """Return the kernel of Acrobot."""
    # The exponent is data, so that the compiler calls pow() like NumPy: x * x differs in the last
    # bit for one argument in a thousand.
    return Kernel(step, (6,), spaces.Discrete(3), float_state=RANGES, constants=(2.0,))


@jit
def step(sim: Simulation, action: NDArray[Any], outcome: Outcome) -> None:
    """Step all N environments."""
    for env in range(len(action)):
        state, obs = sim.float_state[env], outcome.obs[env]
        if sim.clock[env, NEEDS_RESET]:
            begin_episode(sim, outcome, env)
            _hang(state, sim.generators[env], obs)
            continue
        _swing(state, np.float64(action[env] - 1), sim.constants[SQUARE])
        up = -math.cos(state[0]) - math.cos(state[1] + state[0]) > 1.0
        record_step(sim, outcome, env, 0.0 if up else -1.0, up)
        obs[0], obs[1] = math.cos(state[0]), math.sin(state[0])
        obs[2], obs[3] = math.cos(state[1]), math.sin(state[1])
        obs[4], obs[5] = state[2], state[3]


@jit
def _hang(state: NDArray[Any], generator: NDArray[Any], obs: NDArray[Any]) -> None:
    """Start an episode; Gymnasium's initial state is float32."""
    for i in range(4):
        state[i] = F32(uniform(generator, -0.1, 0.1))
    for i in range(2):
        obs[2 * i], obs[2 * i + 1] = small_cos(F32(state[i])), small_sin(F32(state[i]))
    obs[4], obs[5] = state[2], state[3]


@jit
def _swing(state: NDArray[Any], torque: float, square: float) -> None:
    """Integrate one step with the classic Runge-Kutta method."""
    half = SECONDS / 2.0
    k1 = _slope(state[0], state[1], state[2], state[3], torque, square)
    k2 = _slope(*_ahead(state, half, k1), torque, square)
    k3 = _slope(*_ahead(state, half, k2), torque, square)
    k4 = _slope(*_ahead(state, SECONDS, k3), torque, square)
    for i in range(4):
        state[i] = state[i] + SECONDS / 6.0 * (k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i])
    state[0], state[1] = _wrapped(state[0]), _wrapped(state[1])
    state[2] = min(max(state[2], -FASTEST_1), FASTEST_1)
    state[3] = min(max(state[3], -FASTEST_2), FASTEST_2)


@jit
def _ahead(state: NDArray[Any], seconds: float, k: Any) -> Any:
    return (
        state[0] + seconds * k[0],
        state[1] + seconds * k[1],
        state[2] + seconds * k[2],
        state[3] + seconds * k[3],
    )


@jit
def _slope(a: float, b: float, a_dot: float, b_dot: float, torque: float, square: float) -> Any:
    """Return the time derivatives of both angles and both angular velocities."""
    cos_b, sin_b, half_turn = math.cos(b), math.sin(b), math.pi / 2
    d1 = COM * COM + (1.0 + COM * COM + 2 * COM * cos_b) + INERTIA + INERTIA
    d2 = COM * COM + COM * cos_b + INERTIA
    phi2 = COM * GRAVITY * math.cos(a + b - half_turn)
    phi1 = -COM * b_dot**square * sin_b - 2 * COM * b_dot * a_dot * sin_b
    phi1 = phi1 + (COM + 1.0) * GRAVITY * math.cos(a - half_turn) + phi2
    driven = torque + d2 / d1 * phi1 - COM * a_dot**square * sin_b - phi2
    b_acc = driven / (COM * COM + INERTIA - d2**square / d1)
    a_acc = -(d2 * b_acc + phi1) / d1
    return a_dot, b_dot, a_acc, b_acc


@jit
def _wrapped(angle: float) -> float:
    while angle > math.pi:
        angle = angle - 2 * math.pi
    while angle < -math.pi:
        angle = angle + 2 * math.pi
    return angle
