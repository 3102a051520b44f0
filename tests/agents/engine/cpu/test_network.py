"""Compiled layers of any size and memory layout."""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.agents.engine.cpu.network import Convolution, HostNetwork, Layer
from steadyrl.agents.engine.cpu.products import LANES, MANY, ROWS_AT_ONCE

# Sizes below, at and above the block sizes, and remainders of both kinds of blocks.
SIDES = st.sampled_from([1, 3, 4, 5, LANES, LANES + 1, MANY - 1, MANY, MANY + LANES + 3, 2 * MANY])


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 2 * ROWS_AT_ONCE + 1),
    SIDES,
    SIDES,
    SIDES,
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_host_network_equals_torch_and_is_bitwise_per_row(
    batch_size, inputs, hidden, outputs, first_turned, second_turned, seed
):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x = drawn(batch_size, inputs)
    first, second = drawn(inputs, hidden), drawn(hidden, outputs)
    biases = drawn(hidden), drawn(outputs)
    layers = [
        Layer(np.ascontiguousarray(weight.T) if turned else weight, bias, transposed=turned)
        for weight, bias, turned in zip(
            (first, second), biases, (first_turned, second_turned), strict=True
        )
    ]
    network = HostNetwork(layers, "relu")
    found = network(x)
    inner = np.maximum(x.astype(np.float64) @ first + biases[0], 0)
    np.testing.assert_allclose(found, inner @ second + biases[1], rtol=1e-4, atol=1e-3)
    for sample in range(batch_size):
        assert network(x[sample : sample + 1]).tobytes() == found[sample : sample + 1].tobytes()


@settings(deadline=None, max_examples=60)
@given(
    batch_size=st.integers(1, 2 * ROWS_AT_ONCE + 1),
    channels=st.integers(1, 5),
    board=st.tuples(st.integers(1, 11), st.integers(1, 11)),
    side=st.integers(1, 4),
    filters=st.sampled_from([1, 3, LANES, LANES + 1, 2 * LANES]),
    filled=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
def test_host_convolution_equals_torch_and_is_bitwise_per_row(
    batch_size, channels, board, side, filters, filled, seed
):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    tall, wide = min(side, board[0]), min(side + 1, board[1])
    weight, bias = drawn(filters, channels, tall, wide), drawn(filters)
    features = filters * (board[0] - tall + 1) * (board[1] - wide + 1)
    last = Layer(drawn(5, features), drawn(5), transposed=True)
    x = drawn(batch_size, channels, *board) * (rng.random((batch_size, channels, *board)) < filled)
    network = HostNetwork([Convolution(weight, bias, board), last], "tanh")
    found = network(x)
    convolved = F.conv2d(*(torch.from_numpy(a).double() for a in (x, weight, bias)))
    expected = F.linear(
        convolved.relu().flatten(1),
        *(torch.from_numpy(a).double() for a in (last.weight, last.bias)),
    )
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-3)
    for sample in range(batch_size):
        assert network(x[sample : sample + 1]).tobytes() == found[sample : sample + 1].tobytes()


def test_bytes_are_divided_by_255():
    rng = np.random.default_rng(0)
    layer = Layer(rng.standard_normal((4, 6)).astype(np.float32), np.zeros(6, np.float32))
    network = HostNetwork([layer], "relu", scaled=True)
    x = rng.integers(0, 256, (7, 2, 2), np.uint8)
    expected = (x.reshape(7, 4) / 255) @ layer.weight
    np.testing.assert_allclose(network(x), expected, rtol=1e-5, atol=1e-6)
