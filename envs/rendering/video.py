"""Video files: frames are encoded one by one, so memory does not grow with their number."""

from __future__ import annotations

import fcntl
import glob
import importlib
import importlib.util
import math
import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import SettingError

FORMATS = (".mp4", ".gif")
SMALLEST = 240  # pixels: smaller frames are enlarged by an integer factor
FASTEST_GIF = 50  # frames per second; browsers slow faster GIFs down
UNFINISHED = ".unfinished-"  # prefix of a video's name until it is complete


def video_encoder_missing() -> bool:
    """Return whether PyAV is not installed."""
    return importlib.util.find_spec("av") is None


def how_to_install() -> str:
    """Return what is missing without PyAV, and the command that installs it."""
    return f"needs av to write videos, install it with: {install_command('video')}"


def _av() -> Any:
    """Import PyAV, only in the process that encodes."""
    return importlib.import_module("av")


def validate_video_path(key: str, path: Path) -> None:
    """Raise SettingError for a video file that cannot be written, before anything slow starts."""
    if path.suffix.lower() not in FORMATS:
        raise SettingError(key, path, f"must end in {' or '.join(FORMATS)}")
    if path.is_dir():
        raise SettingError(key, path, "is a directory; name a file")
    if not path.parent.is_dir():
        raise SettingError(key, path, f"there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SettingError(key, path, f"{path.parent} cannot be written to")
    if video_encoder_missing():
        raise SettingError(key, path, how_to_install())


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what processes that were killed had filmed of the file of this name, or of any."""
    for path in folder.glob(f"{UNFINISHED}*-{name}"):
        with suppress(OSError):  # its process lives, or somebody else removes it
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


class VideoWriter:
    """Writes a video file (mp4 or gif); it gets its name when it is complete."""

    def __init__(self, path: str, *, fps: float) -> None:
        self._path = Path(path)
        self._unfinished = self._path.with_name(f"{UNFINISHED}{os.getpid()}-{self._path.name}")
        self._lock = -1  # held while this process lives: else what it has filmed may be removed
        most = FASTEST_GIF if self._path.suffix.lower() == ".gif" else math.inf
        self._fps = Fraction(float(min(fps, most))).limit_denominator(1000)
        self._container: Any = None  # opened by the first frame, whose size it takes
        self._closed = False

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return 0 if self._container is None else self._unfinished.stat().st_size

    def add(self, picture: Any) -> None:
        """Encode one frame [H, W, 3]."""
        pixels = as_pixels(picture)
        if self._container is None:
            self._open(*pixels.shape[:2])
        if pixels.shape[:2] != self._size:
            raise ValueError(f"a frame of {pixels.shape[:2]} follows one of {self._size} pixels")
        frame = _av().VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts, frame.time_base = self._count, 1 / self._fps
        self._count += 1
        self._filter(frame)

    def _open(self, height: int, width: int) -> None:
        is_gif = self._path.suffix.lower() == ".gif"
        self._size, self._count = (height, width), 0
        self._hold()
        try:
            place, kind = str(self._unfinished), "gif" if is_gif else "mp4"
            self._container = _av().open(place, "w", format=kind)
        except BaseException:
            self._give_up()
            raise
        stream: Any = self._container.add_stream("gif" if is_gif else "libx264", rate=self._fps)
        stream.width, stream.height = width, height
        stream.pix_fmt = "pal8" if is_gif else "yuv420p"
        stream.time_base = 1 / self._fps
        stream.codec_context.thread_count = 1
        if not is_gif:
            stream.options = {"preset": "veryfast", "crf": "23"}
        self._stream = stream
        self._graph = self._palettes(stream) if is_gif else None

    def _hold(self) -> None:
        """Make the file and lock it."""
        remove_unfinished(self._path.parent, glob.escape(self._path.name))
        self._lock = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with suppress(OSError):  # of file systems without locks, where nothing is removed
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _give_up(self) -> None:
        with suppress(OSError):
            self._unfinished.unlink()
        os.close(self._lock)

    def _palettes(self, stream: Any) -> Any:
        """Return the filter graph that computes a palette per frame."""
        graph = importlib.import_module("av.filter").Graph()
        height, width = self._size
        source = graph.add_buffer(
            width=width, height=height, format="rgb24", time_base=stream.time_base
        )
        split, palette = graph.add("split"), graph.add("palettegen", "stats_mode=single")
        use, sink = graph.add("paletteuse", "new=1:dither=none"), graph.add("buffersink")
        source.link_to(split)
        split.link_to(use, 0, 0)
        split.link_to(palette, 1, 0)
        palette.link_to(use, 0, 1)
        use.link_to(sink)
        graph.configure()
        return graph

    def _filter(self, frame: Any) -> None:
        if self._graph is None:
            self._write(frame)
            return
        self._graph.push(frame)
        self._drain(self._graph)

    def _drain(self, graph: Any) -> None:
        error = _av().error
        with suppress(error.BlockingIOError, error.EOFError):  # needs more input
            while True:
                self._write(graph.pull())

    def _write(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        """Flush the encoder and rename the file; may be called twice."""
        if self._container is None or self._closed:
            return
        self._closed = True
        try:
            if self._graph is not None:
                self._graph.push(None)
                self._drain(self._graph)
            self._write(None)
            self._container.close()
            os.replace(self._unfinished, self._path)
        except BaseException:
            self._give_up()
            raise
        os.close(self._lock)

    def discard(self) -> None:
        """Remove the file unless it is complete; may be called twice."""
        if self._container is not None and not self._closed:
            self._closed = True
            self._give_up()


class PreviewWriter:
    """Writes a small GIF of the first frames, for TensorBoard."""

    EVERY = 2  # every second frame is written
    LARGEST = 2_000_000  # bytes; no frames are added beyond

    def __init__(self, path: str, *, fps: float) -> None:
        self._film = VideoWriter(path, fps=min(fps, FASTEST_GIF) / self.EVERY)
        self._count = 0

    def add(self, picture: Any) -> None:
        """Encode every second frame [H, W, 3] until the file is too large."""
        turn = self._count % self.EVERY == 0
        self._count += 1
        if turn and self._film.size < self.LARGEST:
            pixels = np.asarray(picture)
            skip = max(1, min(pixels.shape[:2]) // SMALLEST)
            self._film.add(pixels[::skip, ::skip])

    def close(self) -> None:
        """Flush the encoder and rename the file; may be called twice."""
        self._film.close()

    def discard(self) -> None:
        """Remove the file unless it is complete; may be called twice."""
        self._film.discard()


def as_pixels(picture: Any) -> NDArray[np.uint8]:
    """Return a frame as uint8 [H, W, 3], enlarged to SMALLEST and padded to even sides."""
    pixels = np.asarray(picture)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"a frame of shape {pixels.shape} is not [height, width, 3]")
    if pixels.dtype.kind == "f":  # colours between 0 and 1
        pixels = np.rint(pixels * 255)
    pixels = np.clip(pixels, 0, 255).astype(np.uint8)
    factor = -(-SMALLEST // min(pixels.shape[:2]))
    if factor > 1:
        pixels = pixels.repeat(factor, 0).repeat(factor, 1)
    odd = [(0, size % 2) for size in pixels.shape[:2]]
    return np.ascontiguousarray(np.pad(pixels, (*odd, (0, 0)), mode="edge"))
