"""A warning for images that use little of their declared range, on every backend."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.pixel_range import FIRST_TIMESTEPS
from steadyrl.envs.factory import build_env, choose_backend

SCALED = "env.image_range=[0,1] would scale them, and clip other values"
LINE = f"observations use 0…1 of 0…255: {SCALED}"


@pytest.fixture
def warnings_(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("steadyrl"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def play(config, timesteps=FIRST_TIMESTEPS + 5):
    with build_env(config, seed=0, num_envs=2) as env:
        env.reset()
        for _ in range(timesteps):
            obs = env.step(np.zeros(2, np.int64)).obs
        return obs


@pytest.mark.parametrize(
    ("backend", "masks"),
    [
        ("sync", "false"),
        ("sync", "true"),
        ("async", "false"),
        ("async", "true"),
        ("batch", "false"),
    ],
)  # a batch has no masks
def test_images_of_0_and_1_are_warned_of_once(backend, masks, warnings_):
    config = settings("dim_envs:Dim-v0", backend=backend, action_masks=masks, frame_stack=2)
    play(config)
    assert [line for line in warnings_() if "image_range" in line] == [f"dim_envs:Dim-v0: {LINE}"]


def test_kernels_with_a_small_image_range_are_warned_of(warnings_):
    play(settings("dim_envs:DimKernel-v0", backend="kernel"))
    assert warnings_() == [f"dim_envs:DimKernel-v0: {LINE}"]


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
def test_a_configured_range_scales_the_observations(backend, warnings_):
    config = settings("dim_envs:Dim-v0", backend=backend, image_range=(0.0, 1.0))
    assert set(np.unique(play(config))) == {0, 255}
    assert warnings_() == []


def test_kernels_are_not_used_with_image_settings():
    for changes, brightest in (
        ({"image_range": (0.0, 1.0)}, 255),
        ({"image_axes": "vector"}, np.float32(1 / 255)),
    ):
        with pytest.raises(SettingError, match=r"use env\.backend=sync"):
            choose_backend(settings("dim_envs:DimKernel-v0", backend="kernel", **changes))
        auto = settings("dim_envs:DimKernel-v0", backend="auto", **changes)
        assert choose_backend(auto)[0] == "sync"
        assert play(auto).max() == brightest


def test_a_kernel_defines_its_image_axes():
    config = settings("dim_envs:DimKernel-v0")
    with build_env(config, seed=0) as env:
        assert env.spec.frame_shape == (9, 10, 14)


@pytest.mark.parametrize("bright", [100, 255])
def test_full_range_images_and_evaluation_cause_no_warning(bright, warnings_):
    play(settings("dim_envs:Dim-v0", kwargs={"bright": bright}))
    play(settings("dim_envs:Dim-v0").for_evaluation())
    assert warnings_() == []


@pytest.mark.parametrize("limits", [(1.0, 0.0), (0.0,), (0.0, 1.0, 2.0), (1.0, 1.0)])
def test_invalid_image_ranges_are_rejected(limits):
    with pytest.raises(SettingError, match=r"image_range=.*lowest and the highest"):
        settings(image_range=limits)
    with pytest.raises(SettingError, match="treats them as vectors"):
        settings(image_range=(0.0, 1.0), image_axes="vector")


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("masks", ["false", "true"])
def test_vectors_of_bytes_are_warned_of_likewise(backend, masks, warnings_):
    flat = ({"FlattenObservation": {}},)
    config = settings("dim_envs:Dim-v0", backend=backend, action_masks=masks, wrappers=flat)
    assert play(config)[:, :243].max() == np.float32(1 / 255)
    [line] = warnings_()
    advice = "{DtypeObservation: {dtype: numpy:float32}}"
    assert "observations use 0…1 of 0…255: bytes are divided by 255" in line and advice in line


def test_vectors_of_bytes_are_left_alone_as_advised(warnings_):
    wrappers = ({"FlattenObservation": {}}, {"DtypeObservation": {"dtype": "numpy:float32"}})
    assert play(settings("dim_envs:Dim-v0", wrappers=wrappers))[:, :243].max() == 1
    play(settings("dim_envs:Dim-v0", wrappers=({"FlattenObservation": {}},), kwargs={"bright": 99}))
    assert warnings_() == []
