"""Layers as machine code, of any size and however their weights lie."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.host_network import HostNetwork, Layer
from agents.small_products import LANES, MANY

# Below, at and above what is added up at once, and what is left over after both kinds of blocks.
SIDES = st.sampled_from([1, 3, 4, 5, LANES, LANES + 1, MANY - 1, MANY, MANY + LANES + 3, 2 * MANY])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), SIDES, SIDES, SIDES, st.booleans(), st.booleans(), st.integers(0, 99))
def test_products_are_those_of_matrices_and_the_same_for_each_row_alone(
    rows, inputs, hidden, outputs, first_turned, second_turned, seed
):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x = drawn(rows, inputs)
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
    for row in range(rows):
        assert network(x[row : row + 1]).tobytes() == found[row : row + 1].tobytes()
