"""Images that use little of what their space declares are said to, on every backend."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.pixel_range import FIRST_TIMESTEPS
from steadyrl.envs.factory import build_env, choose_backend

LINE = "observations use 0…1 of 0…255: env.image_range=[0,1] would scale them"


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("steadyrl"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def play(config, rows=FIRST_TIMESTEPS + 5):
    with build_env(config, seed=0, num_envs=2) as env:
        env.reset()
        for _ in range(rows):
            obs = env.step(np.zeros(2, np.int64)).obs
        return obs


@pytest.mark.parametrize("masks", ["false", "true"])
@pytest.mark.parametrize("backend", ["sync", "async", "native"])
def test_an_image_of_zeros_and_ones_is_said_to_be_one_once(backend, masks, said):
    if backend == "native" and masks == "true":
        pytest.skip("a batch gives no masks")
    config = settings("dim_envs:Dim-v0", backend=backend, action_masks=masks, frame_stack=2)
    play(config)
    assert [line for line in said() if "image_range" in line] == [f"dim_envs:Dim-v0: {LINE}"]


def test_a_kernel_that_makes_such_images_is_said_to(said):
    play(settings("dim_envs:DimKernel-v0", backend="kernel"))
    assert said() == [f"dim_envs:DimKernel-v0: {LINE}"]


@pytest.mark.parametrize("backend", ["sync", "async", "native"])
def test_the_range_that_is_said_is_what_the_agent_sees(backend, said):
    config = settings("dim_envs:Dim-v0", backend=backend, image_range=(0.0, 1.0))
    assert set(np.unique(play(config))) == {0, 255}
    assert said() == []


def test_kernels_write_what_is_seen_in_their_own_way():
    for changes, brightest in (
        ({"image_range": (0.0, 1.0)}, 255),
        ({"image_axes": "vector"}, np.float32(1 / 255)),
    ):
        with pytest.raises(SettingError, match=r"use env\.backend=sync"):
            choose_backend(settings("dim_envs:DimKernel-v0", backend="kernel", **changes))
        auto = settings("dim_envs:DimKernel-v0", backend="auto", **changes)
        assert choose_backend(auto)[0] == "sync"
        assert play(auto).max() == brightest


def test_a_kernels_image_lies_as_the_kernel_says():
    config = settings("dim_envs:DimKernel-v0")
    with build_env(config, seed=0) as env:
        assert env.spec.frame_shape == (9, 10, 14)


@pytest.mark.parametrize("bright", [100, 255])
def test_what_uses_its_range_and_evaluation_are_not_spoken_of(bright, said):
    play(settings("dim_envs:Dim-v0", kwargs={"bright": bright}))
    play(settings("dim_envs:Dim-v0").for_evaluation())
    assert said() == []


@pytest.mark.parametrize("limits", [(1.0, 0.0), (0.0,), (0.0, 1.0, 2.0), (1.0, 1.0)])
def test_a_range_that_is_none_is_refused(limits):
    with pytest.raises(SettingError, match=r"image_range=.*lowest and the highest"):
        settings(image_range=limits)
    with pytest.raises(SettingError, match="treats them as vectors"):
        settings(image_range=(0.0, 1.0), image_axes="vector")
