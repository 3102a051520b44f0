"""CUDA graph capture: other threads keep running, a failed capture is cleaned up."""

import gc
import logging
import threading

import pytest
import torch

from steadyrl.core.cuda_graph import CudaGraphed, capture

MB = 1_000_000
ON_A_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Device:
    """Fake of what `capture` uses of torch: streams, pools and generators during a capture."""

    def __init__(self):
        self.stream, self.allocating, self.pools, self.modes = "main", [], [], []
        self.invalid = self.generator_captures = False

    @property
    def state(self):
        return self.stream, self.allocating, self.pools, self.generator_captures

    def end_pool(self, _, pool):
        if pool not in self.allocating:
            raise RuntimeError("not currently recording to mempool_id")
        self.allocating.remove(pool)

    def release_pool(self, _, pool):
        self.pools.remove(pool)


class Stream:
    """Context that makes another stream the current one."""

    def __init__(self, device, stream):
        self._device, self._stream = device, stream

    def __enter__(self):
        self._before, self._device.stream = self._device.stream, self._stream

    def __exit__(self, *_):
        self._device.stream = self._before


class Graph:
    """Fake CUDA graph, which holds its pool until reset."""

    def __init__(self, device):
        self._device, self._pool, self._whole = device, None, False

    def capture_begin(self, pool=None, capture_error_mode="global", **_):
        self._pool = pool
        self._device.allocating.append(pool)
        self._device.pools.append(pool)
        self._device.modes.append(capture_error_mode)
        self._device.generator_captures = True

    def capture_end(self):
        if self._device.invalid:
            self._device.invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self._device.allocating.pop()
        self._device.generator_captures, self._whole = False, True

    def reset(self):
        if self._whole:
            self._device.release_pool(0, self._pool)

    def replay(self):
        pass


class Generator:
    """Fake generator, whose state may belong to a capture."""

    def __init__(self, device):
        self._device = device

    def clone_state(self):
        return "outside of captures"

    def graphsafe_set_state(self, state):
        self._device.generator_captures = state != "outside of captures"


@pytest.fixture
def device(monkeypatch):
    """Replace torch's CUDA functions by the fake device."""
    found, pools = Device(), iter(range(100))
    cuda = {
        "CUDAGraph": lambda: Graph(found),
        "Stream": lambda: "side",
        "stream": lambda stream: Stream(found, stream),
        "current_stream": lambda: found.stream,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: next(pools),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "default_generators": (Generator(found),),
    }
    private = {
        "_cuda_endAllocateToPool": found.end_pool,
        "_cuda_releasePool": found.release_pool,
        "_host_emptyCache": lambda: None,
    }
    for module, names in ((torch.cuda, cuda), (torch._C, private)):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    return found


def test_each_capture_has_its_own_pool_and_is_thread_local(device):
    replays = [capture(lambda: None) for _ in range(2)]
    assert device.modes == ["thread_local"] * 2
    assert device.state == ("main", [], [0, 1], False)
    assert len(replays) == 2


def synchronises(device):
    """Invalidate the capture and raise at once, as a synchronisation does."""
    device.invalid = True
    raise RuntimeError("operation not permitted when stream is capturing")


def fails_at_the_end(device):
    """Invalidate the capture; only its end raises."""
    device.invalid = True


def raises(_):
    """Raise an error unrelated to the capture."""
    raise ValueError("unrelated error")


@pytest.mark.parametrize("fault", [synchronises, fails_at_the_end, raises])
def test_a_failed_capture_releases_stream_pool_and_generator(device, fault):
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)):
            capture(lambda: fault(device))
        assert device.state == ("main", [], [], False)
    capture(lambda: None)
    assert device.state == ("main", [], [2], False)


def test_the_warning_names_the_first_capture_error(device, caplog):
    graphed = CudaGraphed(lambda x: synchronises(device), "a test")
    graphed._calls = CudaGraphed.WARM_UP
    with caplog.at_level(logging.WARNING, "steadyrl"), pytest.raises(RuntimeError):
        graphed(torch.ones(1))
    (message,) = caplog.messages
    assert "not permitted when stream is capturing" in message


class TestOnADevice:
    pytestmark = ON_A_DEVICE

    def reserved(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def attempt(self, end):
        """Fail to capture a function that allocates."""

        def fails():
            large = torch.empty(100 * MB, dtype=torch.uint8, device="cuda")
            return end(large[:4].float())

        with pytest.raises((RuntimeError, ValueError)):
            capture(fails)

    @pytest.mark.parametrize("end", [torch.Tensor.item, lambda _: int("a word")])
    def test_memory_can_be_allocated_after_a_failed_capture(self, end):
        warm = torch.ones(4, dtype=torch.uint8, device="cuda").float()
        torch.rand(1, device="cuda")
        stream, before = torch.cuda.current_stream(), self.reserved()
        self.attempt(end)
        assert torch.cuda.current_stream() == stream
        assert self.reserved() == before
        large = torch.empty(300 * MB, dtype=torch.uint8, device="cuda")
        del large, warm
        assert self.reserved() <= before
        assert 0 <= torch.rand(1, device="cuda").item() < 1
        double, result = capture(lambda: torch.ones(2, device="cuda") * 2)
        double()
        assert result.tolist() == [2.0, 2.0]

    def test_further_graphs_keep_no_memory(self):
        left, right = torch.rand(64, 64, device="cuda"), torch.rand(64, 64, device="cuda")
        sizes = []
        for _ in range(4):
            graphed = CudaGraphed(torch.mm)
            for _ in range(CudaGraphed.WARM_UP + 2):
                graphed(left, right)
            del graphed
            self.reserved()
            sizes.append(torch.cuda.memory_allocated())
        assert sizes[1:] == sizes[:1] * 3

    def test_other_threads_allocate_during_a_capture(self):
        go, done, failed = threading.Event(), threading.Event(), []

        def other():
            go.wait()
            try:
                torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
                torch.empty(1000).pin_memory()
            except RuntimeError as error:
                failed.append(error)
            done.set()

        def function():
            go.set()
            done.wait()
            return x * 2

        x = torch.full((2,), 3.0, device="cuda")
        x * 2
        torch.cuda.empty_cache()
        thread = threading.Thread(target=other)
        thread.start()
        replay, result = capture(function)
        thread.join()
        assert failed == []
        replay()
        assert result.tolist() == [6.0, 6.0]
