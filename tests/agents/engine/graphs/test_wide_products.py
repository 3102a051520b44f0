"""Our matrix products in graphs, for every memory layout."""

import ctypes
import os
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.agents.engine.graphs import wide_products
from steadyrl.agents.engine.graphs.graph_cache import host_code
from steadyrl.agents.engine.graphs.trace import trace
from steadyrl.agents.engine.graphs.wide_products import CODE, faster_here, is_supported, operator
from tests.agents.engine.graphs.test_trace import targets

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has no AVX-512"
)
FUNCTION = """
extern "C" void multiply(const float* left, int64_t left_apart, int64_t left_down,
                         int64_t left_across, const float* right, int64_t right_apart,
                         int64_t right_down, int64_t right_across, float* sums, int64_t rows,
                         int64_t inner, int64_t columns, int64_t pairs, int threads) {
  steadyrl::multiply({left, rows, inner, left_down, left_across}, left_apart,
                     {right, inner, columns, right_down, right_across}, right_apart, sums, pairs,
                     threads);
}
"""


@pytest.fixture
def everywhere(monkeypatch, tmp_path):
    """Use our own product code on any processor, without the graph cache."""
    monkeypatch.setattr(wide_products, "faster_here", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def multiply(tmp_path_factory):
    """Return the function of product.h for NumPy's arrays [pairs, …]."""
    folder = tmp_path_factory.mktemp("product")
    (folder / "product.cpp").write_text(CODE.read_text() + FUNCTION)
    flags = ["-O2", "-mavx512f", "-mfma", "-fopenmp", "-shared", "-fPIC", "-std=c++17", "-Wall"]
    files = [str(folder / "product.cpp"), "-o", str(folder / "product.so")]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, *files], check=True)
    function = ctypes.CDLL(str(folder / "product.so")).multiply

    def product(left, right, threads):
        (pairs, rows, inner), columns = left.shape, right.shape[2]
        sums = np.full((pairs + 1, rows, columns), -7, np.float32)
        arguments = []
        for each in (left, right):
            arguments += [ctypes.c_void_p(each.ctypes.data)]
            arguments += [ctypes.c_int64(stride // each.itemsize) for stride in each.strides]
        sizes = [ctypes.c_int64(size) for size in (rows, inner, columns, pairs)]
        function(*arguments, ctypes.c_void_p(sums.ctypes.data), *sizes, ctypes.c_int(threads))
        assert (sums[-1] == -7).all()  # nothing is written past the end
        return sums[:-1]

    return product


def lying(array, order, spare):
    """Return the same numbers with another memory layout, with gaps."""
    across = np.ascontiguousarray(array.transpose(order))
    wider = np.full((*across.shape[:-1], across.shape[-1] + spare), np.nan, np.float32)
    wider[..., : across.shape[-1]] = across
    return wider[..., : across.shape[-1]].transpose(np.argsort(order))


ORDERS = st.sampled_from([(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])


@needs_avx512
@settings(deadline=None, max_examples=200)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(0, 600), st.integers(1, 140)),
    st.tuples(ORDERS, ORDERS),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_products_are_accurate(multiply, sizes, orders, spare, threads):
    pairs, rows, inner, columns = sizes
    rng = np.random.default_rng(sizes)
    left = rng.standard_normal((pairs, rows, inner), dtype=np.float32)
    right = rng.standard_normal((pairs, inner, columns), dtype=np.float32)
    found = multiply(lying(left, orders[0], spare), lying(right, orders[1], spare), threads)
    expected = left.astype(float) @ right.astype(float)
    # A sum is rounded once per addend, by at most 2^-24 of its largest value so far.
    bound = inner * 2.0**-24 * (np.abs(left).astype(float) @ np.abs(right).astype(float))
    assert (np.abs(found - expected) <= bound * 1.001).all()


@needs_avx512
def test_empty_products_are_0(multiply):
    left, right = np.empty((2, 7, 0), np.float32), np.empty((2, 0, 70), np.float32)
    assert (multiply(left, right, 1) == 0).all()


@needs_avx512
def test_products_are_bitwise_equal_with_several_threads(multiply):
    rng = np.random.default_rng(0)
    left = rng.standard_normal((2, 101, 300), dtype=np.float32)
    right = rng.standard_normal((2, 300, 130), dtype=np.float32)
    alone = multiply(left, right, 1)
    np.testing.assert_allclose(alone, left @ right, rtol=1e-4, atol=1e-4)
    for threads in (2, 3):
        assert multiply(left, right, threads).tobytes() == alone.tobytes()


def network(x, goal, w, b, v, parallel_layers, shift):
    """Return a loss whose gradient has plain, transposed and batched products."""
    h = torch.addmm(b, x, w.t()).relu()
    y = torch.baddbmm(shift, h.expand(2, *h.shape), parallel_layers).tanh()
    return ((y[0] + y[1] @ v - goal) ** 2).mean()


def arguments():
    g = torch.Generator().manual_seed(0)
    shapes = (64, 200), (64, 160), (160, 200), (160,), (160, 160), (2, 160, 160), (2, 1, 160)
    return tuple(torch.randn(shape, generator=g) / 10 for shape in shapes)


def gradients(x, goal, *weights):
    weights = [weight.detach().requires_grad_() for weight in weights]
    with torch.enable_grad():
        loss = network(x, goal, *weights)
        return *torch.autograd.grad(loss, weights), loss.detach()


@pytest.mark.long
@needs_avx512
@pytest.mark.usefixtures("everywhere")
def test_gradients_of_products_are_accurate():
    given = arguments()
    graph, captured = trace(gradients, given)
    assert not captured and operator() in targets(graph)
    assert not {torch.ops.aten.addmm.default, torch.ops.aten.bmm.default} & targets(graph)
    run = host_code(graph, list(given))
    exact = gradients(*(part.double() for part in given))
    for found, again, expected in zip(run(list(given)), run(list(given)), exact, strict=True):
        assert torch.equal(found, again)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@needs_avx512
@pytest.mark.usefixtures("everywhere")
def test_operands_may_share_a_tensor():
    g = torch.Generator().manual_seed(0)
    given = torch.randn((20, 12), generator=g), torch.randn((10, 30), generator=g)

    def products(x, w):
        return x @ x.t(), x[2:7, 3:] @ w[1:, 4:9], (x[:, :10] @ w).tanh().sum(0)

    graph, _ = trace(products, given)
    found = host_code(graph, list(given))(list(given))
    for mine, expected in zip(found, products(*given), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("everywhere")
def test_added_matrices_are_not_biases():
    given = torch.ones(64, 256), torch.zeros(64, 256), torch.zeros(256, 256)
    graph, _ = trace(torch.addmm, given)
    assert torch.equal(graph(*given), torch.ones(64, 256))


@pytest.mark.usefixtures("everywhere")
def test_other_dtypes_use_torch():
    left, right = torch.zeros(64, 256), torch.zeros(256, 256)
    assert is_supported(left, right)
    assert not is_supported(left, right.double())
    assert not is_supported(left.bfloat16(), right.bfloat16())
    assert not is_supported(left.to("meta"), right.to("meta"))


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_only_amd_processors_with_avx512_are_supported(
    tmp_path, monkeypatch, vendor, capability, expected
):
    processor = tmp_path / "cpuinfo"
    if vendor is not None:
        processor.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(wide_products, "PROCESSOR", processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert faster_here.__wrapped__() is expected
