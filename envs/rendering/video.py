"""Films: pictures go to an encoder one by one, so that their number costs no memory."""

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

from steadyrl.core.errors import SettingError

FORMATS = (".mp4", ".gif")
SMALLEST = 240  # pixels: smaller pictures are enlarged by a whole factor
FASTEST_GIF = 50  # pictures a second, which browsers show as they are
UNFINISHED = ".unfinished-"  # what the name of a film begins with until it is whole
MISSING = 'needs av to write videos, install it with: pip install -e ".[video]"'


def video_encoder_missing() -> bool:
    """Tell whether the package that encodes is not installed."""
    return importlib.util.find_spec("av") is None


def _av() -> Any:
    """Import the encoder, in the process that encodes."""
    return importlib.import_module("av")


def validate_video_path(key: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything slow."""
    if path.suffix.lower() not in FORMATS:
        raise SettingError(key, path, f"must end in {' or '.join(FORMATS)}")
    if path.is_dir():
        raise SettingError(key, path, "is a directory; name a file")
    if not path.parent.is_dir():
        raise SettingError(key, path, f"there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SettingError(key, path, f"{path.parent} cannot be written to")
    if video_encoder_missing():
        raise SettingError(key, path, MISSING)


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
    """A video file, which has its name once it is whole."""

    def __init__(self, path: str, *, fps: float) -> None:
        self._path = Path(path)
        self._unfinished = self._path.with_name(f"{UNFINISHED}{os.getpid()}-{self._path.name}")
        self._lock = -1  # held while this process lives: else what it has filmed may be removed
        most = FASTEST_GIF if self._path.suffix.lower() == ".gif" else math.inf
        self._fps = Fraction(min(fps, most)).limit_denominator(1000)
        self._container: Any = None  # opened by the first picture, which has its size
        self._closed = False

    @property
    def size(self) -> int:
        """Return how many bytes are in the file so far."""
        return 0 if self._container is None else self._unfinished.stat().st_size

    def add(self, picture: Any) -> None:
        """Encode one picture [H, W, 3]."""
        pixels = as_pixels(picture)
        if self._container is None:
            self._open(*pixels.shape[:2])
        if pixels.shape[:2] != self._size:
            raise ValueError(f"a picture of {pixels.shape[:2]} follows one of {self._size} pixels")
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
        """Return the filter that gives every picture a palette of its own."""
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
        with suppress(error.BlockingIOError, error.EOFError):  # it waits for more
            while True:
                self._write(graph.pull())

    def _write(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        """Write what is still held and give the file its name; safe to call twice."""
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


class PreviewWriter:
    """A small film of the first pictures, as a GIF: what fits into a page of TensorBoard."""

    EVERY = 2  # pictures of which one is shown
    LARGEST = 2_000_000  # bytes, from which on no picture is added

    def __init__(self, path: str, *, fps: float) -> None:
        self._film = VideoWriter(path, fps=min(fps, FASTEST_GIF) / self.EVERY)
        self._count = 0

    def add(self, picture: Any) -> None:
        """Encode one picture [H, W, 3], if it is its turn and there is room."""
        turn = self._count % self.EVERY == 0
        self._count += 1
        if turn and self._film.size < self.LARGEST:
            pixels = np.asarray(picture)
            skip = max(1, min(pixels.shape[:2]) // SMALLEST)
            self._film.add(pixels[::skip, ::skip])

    def close(self) -> None:
        """Write what is still held and give the file its name; safe to call twice."""
        self._film.close()


def as_pixels(picture: Any) -> NDArray[np.uint8]:
    """Return a picture as bytes [H, W, 3], large enough to see and even for the encoder."""
    pixels = np.asarray(picture)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"a picture of shape {pixels.shape} is none of [height, width, 3]")
    if pixels.dtype.kind == "f":  # colours between 0 and 1
        pixels = np.rint(pixels * 255)
    pixels = np.clip(pixels, 0, 255).astype(np.uint8)
    factor = -(-SMALLEST // min(pixels.shape[:2]))
    if factor > 1:
        pixels = pixels.repeat(factor, 0).repeat(factor, 1)
    odd = [(0, size % 2) for size in pixels.shape[:2]]
    return np.ascontiguousarray(np.pad(pixels, (*odd, (0, 0)), mode="edge"))
