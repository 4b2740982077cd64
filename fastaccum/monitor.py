"""Memory over time: sampled in the background, shown on a live line, drawn to a file."""

from __future__ import annotations

import bisect
import os
import shutil
import subprocess
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from fastaccum import arguments

GIB = 1 << 30
_STATUS = Path("/proc/self/statm")

# What each of the sources measures; those that are here are sampled.
SOURCES = {
    "allocated": "tensors, as the CUDA allocator counts them",
    "reserved": "what the CUDA allocator holds, free blocks too",
    "device": "all of the GPU that is in use, by anyone (NVML, else nvidia-smi)",
    "rss": "the process's resident memory",
}


class Sample(NamedTuple):
    """One moment.

    Attributes:
        seconds: since the monitor was started.
        bytes: by source, see ``SOURCES``.
    """

    seconds: float
    bytes: dict[str, int]


class MemoryMonitor:
    """Samples memory while a block runs, or whenever it is called, and knows the peak.

    As a context manager it samples in a thread, every ``interval`` seconds and once at either end::

        with MemoryMonitor(live=True) as monitor:
            train()
        print(monitor.peak())
        monitor.plot("memory.png")

    As a callback it takes a sample when it is called, with a mark if one is given: ``monitor("update 3")``.
    It needs no block for that, and can be handed to a loop or registered as a step hook:
    ``optimizer.register_step_post_hook(monitor)``.

    On a GPU the sources are the CUDA allocator (``allocated``, ``reserved``) and the whole device's use
    (``device``, from NVML where ``pynvml`` is installed, else from ``nvidia-smi``); on the CPU it is the
    resident memory of the process (``rss``). What lives for less than ``interval`` seconds may be missed,
    except by ``allocated``: the allocator keeps its peak (a block resets torch's peak statistics).

    Args:
        device: by default the current GPU if CUDA is up, else the CPU.
        interval: seconds between samples, above 0.
        live: show a line with the newest sample and the peak (needs ``rich``).

    Raises:
        TypeError, ValueError: a wrong argument, or no way to measure that device.
        ImportError: ``live`` without rich; the message names the extra to install.
    """

    def __init__(
        self, device: torch.device | str | None = None, *, interval: float = 0.1, live: bool = False
    ) -> None:
        if interval is None:
            raise TypeError("interval must be a number of seconds, got None")
        self.interval = arguments.positive(interval, "interval", "it is the seconds between two samples")
        self._shows = arguments.boolean(live, "live")
        if self._shows:
            _needs("rich", "live=True")
        self.device = _device(device)
        self.samples: list[Sample] = []
        self.marks: list[tuple[float, str]] = []
        self._began: float | None = None
        self._lock = threading.Lock()  # a callback's samples and the thread's are in order
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._line: Any = None
        self._inside = False  # a block, whose peak the CUDA allocator keeps
        self._allocated_peak = 0
        self._whole_device = _device_reader(self.device) if self.device.type == "cuda" else None

    # ------------------------------------------------------------------------------------- sampling

    def __call__(self, *mark: Any) -> None:
        """Takes a sample; a string that is given is remembered as a mark of this moment.

        Other arguments, such as a hook's, are not looked at.
        """
        self._take()
        if mark and isinstance(mark[0], str):
            self.marks.append((self.samples[-1].seconds, mark[0]))

    def __enter__(self) -> MemoryMonitor:
        """Starts the thread."""
        if self._thread is not None:
            raise RuntimeError("this monitor is running already: use one per block")
        self._stop.clear()
        self._failed = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._inside = True
        self._take()
        if self._shows:
            from rich.live import Live

            self._line = Live(self._text(), refresh_per_second=8, transient=True)
            self._line.start()
        self._thread = threading.Thread(target=self._run, name="fastaccum memory monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread and takes a last sample; an exception of the block goes on."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join()
        try:
            self._take()
        finally:
            self._inside = False
            if self._line is not None:
                self._line.update(self._text())
                self._line.stop()
                self._line.console.print(self._text(), highlight=False)
                self._line = None
        if self._failed is not None and kind is None:
            raise RuntimeError(f"the monitor stopped sampling: {self._failed}") from self._failed

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._take()
            except Exception as failure:  # raised where the block ends
                self._failed = failure
                return
            if self._line is not None:
                self._line.update(self._text())

    def _take(self) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._began is None:
                self._began = now
            self.samples.append(Sample(now - self._began, self._read()))

    def _read(self) -> dict[str, int]:
        if self.device.type == "cpu":
            return {"rss": resident_bytes()}
        found = {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
        }
        if self._inside:
            self._allocated_peak = torch.cuda.max_memory_allocated(self.device)
        if self._whole_device is not None:
            found["device"] = self._whole_device()
        return found

    # --------------------------------------------------------------------------------------- results

    def peak(self, source: str | None = None) -> int:
        """The most bytes that a source had; by default ``allocated`` on a GPU, ``rss`` on the CPU.

        Args:
            source: a key of :attr:`Sample.bytes`.

        Raises:
            ValueError: there is no sample yet, or no such source.
        """
        source = source or ("rss" if self.device.type == "cpu" else "allocated")
        if not self.samples:
            raise ValueError("no sample was taken yet: use the monitor in a `with`, or call it")
        if source not in self.samples[0].bytes:
            raise ValueError(f"source must be one of {', '.join(self.samples[0].bytes)}, got {source!r}")
        most = max(sample.bytes[source] for sample in self.samples)
        if source == "allocated":
            most = max(most, self._allocated_peak)
        return most

    def plot(self, path: str | os.PathLike[str], limit: int | None = None) -> Path:
        """Draws the samples over time to a PNG file.

        Args:
            path: the file; its folder must be there.
            limit: bytes at which to draw a line, for example what a :class:`MemoryPlan` predicted.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is missing; the message names the extra to install.
            TypeError, ValueError: ``limit`` is not an int of at least 1; there is no sample yet.
        """
        _needs("matplotlib", "plot()")
        if limit is not None:
            arguments.whole(limit, "limit", 1, "bytes")
        self.peak()  # refuses an empty one
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        # No pyplot: the caller's backend and figures stay as they are.
        figure = Figure(figsize=(9, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        seconds = [sample.seconds for sample in self.samples]
        for source in self.samples[0].bytes:
            values = [sample.bytes[source] / GIB for sample in self.samples]
            axes.plot(seconds, values, label=f"{source}, peak {self.peak(source) / GIB:.3f} GiB")
        if limit is not None:
            axes.axhline(limit / GIB, color="black", linestyle="--", label=f"limit {limit / GIB:.3f} GiB")
        for second, text in self.marks:
            axes.axvline(second, color="grey", linewidth=0.6)
            axes.annotate(
                text, (second, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7
            )
        axes.set(xlabel="seconds", ylabel="GiB", ylim=(0, None), title=f"memory on {self.device}")
        axes.legend(frameon=False, loc="lower right")
        path = Path(path)
        figure.savefig(path, dpi=120, format="png")
        return path

    def at(self, seconds: float) -> Sample:
        """The last sample that was taken by then; the first one before it.

        Args:
            seconds: since the monitor was started.

        Raises:
            ValueError: there is no sample yet.
        """
        self.peak()
        position = bisect.bisect_right([sample.seconds for sample in self.samples], seconds)
        return self.samples[max(position - 1, 0)]

    def _text(self) -> str:
        newest = self.samples[-1]
        shown = ", ".join(
            f"{source} {size / GIB:.3f} GiB (peak {self.peak(source) / GIB:.3f})"
            for source, size in newest.bytes.items()
        )
        return f"{self.device}: {shown}, {newest.seconds:.1f} s"


# ----------------------------------------------------------------------------------------- sources


def resident_bytes() -> int:
    """The process's resident memory, from Linux's ``/proc``."""
    return int(_STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA GPU, got {chosen}")
    if chosen.type == "cpu":
        if not _STATUS.is_file():
            raise ValueError(f"the resident memory is read from {_STATUS}, which this system does not have")
        return chosen
    if not torch.cuda.is_available():
        raise ValueError(f"device is {chosen}, and torch sees no GPU here")
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)


def _device_reader(device: torch.device) -> Any:
    """A function that reads the bytes in use on a whole GPU; None if neither NVML nor nvidia-smi is here."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if find_spec("pynvml") is not None:
        import pynvml

        pynvml.nvmlInit()
        # By its UUID: NVML does not follow CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    return lambda: used_by_nvidia_smi(program, name)


def used_by_nvidia_smi(program: str, uuid: str) -> int:
    """Bytes in use on the GPU with that UUID, as ``nvidia-smi`` tells (in MiB).

    Raises:
        RuntimeError: it failed; with what it said.
    """
    command = [program, f"--id={uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if result.returncode:
        raise RuntimeError(f"nvidia-smi failed with {result.returncode}: {result.stderr or result.stdout}")
    return int(result.stdout.strip()) << 20


def _needs(package: str, what: str) -> None:
    if find_spec(package) is None:
        raise ImportError(f'{what} needs {package}: pip install "fastaccum[plot]"')
