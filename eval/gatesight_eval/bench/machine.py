"""What a benchmark asks of the machine: clocks, ceilings, peak memory of parts of a pass, calls seen from outside."""

import functools
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

#: Calls between two events of a GPU: the latency of one launch would hide the kernel.
GPU_CALLS = 10


def hardware(device: torch.device) -> str:
    """Model of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()} CPU)" if names else f"{platform.machine()} CPU"


def clock(device: torch.device) -> float:
    """Seconds, when all work that was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(
    function: Callable[[], Any],
    device: torch.device,
    repeats: int,
    pick: Callable[[list[float]], float] = median,
) -> float:
    """Time of a call after a warm-up, the median unless told otherwise; on a GPU over several calls in a row."""
    function()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(GPU_CALLS):
                function()
            last.record()
            last.synchronize()
            found.append(first.elapsed_time(last) / 1e3 / GPU_CALLS)
        else:
            begun = time.perf_counter()
            function()
            found.append(time.perf_counter() - begun)
    return pick(found)


class Stopwatch:
    """Sums the parts of a pass that run inside it.

    On a GPU each part is taken between two events of its stream, so that the pass itself is not held up; latency of
    launches on an idle stream counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = 0.0
        self._events: list[tuple[Any, Any]] = []
        self.parts = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self.parts += 1
        if self._device.type == "cuda":
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            yield
            pair[1].record()
            self._events.append((pair[0], pair[1]))
        else:
            begun = time.perf_counter()
            yield
            self._host += time.perf_counter() - begun

    @property
    def seconds(self) -> float:
        if self._events:
            torch.cuda.synchronize(self._device)
        return self._host + sum(first.elapsed_time(last) for first, last in self._events) / 1e3


@contextmanager
def around_calls(owner: Any, name: str, *contexts: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run every call of the function `owner.name`, of a module or class, inside contexts; always undone."""
    own = vars(owner).get(name)
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return plain(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)  # it was inherited
        else:
            setattr(owner, name, own)


class PeakMeter:
    """The most memory that parts of a pass take beyond what was held when they began.

    On a GPU what the allocator of torch gave out; on a CPU the same from the events of `torch.profiler`, which sees
    every tensor, while the resident set of the process depends on what the C library holds back. Parts may be nested.
    Of a part that runs several times the largest counts. Scratch memory that a library takes by itself is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self.how = "torch.cuda.max_memory_allocated" if device.type == "cuda" else "torch.profiler, profile_memory"
        self._device = device
        self._watching = False
        #: Of the parts under way on a GPU: bytes at the start, and the most so far.
        self._open: list[list[int]] = []
        self._peaks: dict[str, int] = {}

    def peak(self, name: str) -> int | None:
        """Bytes; None if the part did not run, or nothing could be seen."""
        return self._peaks.get(name)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Parts outside of this cost and see nothing."""
        self._watching = True
        try:
            if self._device.type == "cuda":
                yield
                return
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            ) as profile:
                yield
            self._read(getattr(profile.profiler, "kineto_results", None))
        finally:
            self._watching = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self._watching:
            yield
        elif self._device.type == "cpu":
            with torch.profiler.record_function(_PART + name):
                yield
        else:
            self._note_peak()
            torch.cuda.reset_peak_memory_stats(self._device)
            held = torch.cuda.memory_allocated(self._device)
            self._open.append([held, held])
            try:
                yield
            finally:
                self._note_peak()
                begun, most = self._open.pop()
                self._note(name, most - begun)
                if self._open:
                    self._open[-1][1] = max(self._open[-1][1], most)
                torch.cuda.reset_peak_memory_stats(self._device)

    def _note_peak(self) -> None:
        if self._open:
            self._open[-1][1] = max(self._open[-1][1], torch.cuda.max_memory_allocated(self._device))

    def _note(self, name: str, size: int) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), size)

    def _read(self, results: Any) -> None:
        if results is None:
            self.how = "not available"
            return
        events = results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        times = [at for at, _ in changes]
        held = [0, *accumulate(size for _, size in changes)]
        for event in events:
            if event.name().startswith(_PART):
                first = bisect_left(times, event.start_ns())
                last = bisect_left(times, event.start_ns() + event.duration_ns())
                self._note(event.name().removeprefix(_PART), max(held[first : last + 1]) - held[first])


_PART = "gatesight part: "


def ceilings(device: torch.device, dtype: torch.dtype, tiny: bool) -> dict[str, float]:
    """What the machine reaches here and now: streaming copy in bytes/s (read + written), matrix products in FLOP/s."""
    on_gpu = device.type == "cuda"
    numbers = 2**18 if tiny else 2**29 if on_gpu else 2**26
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    found = {"copy_bytes_per_s": 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, 5, min)}
    size = 128 if tiny else 8192 if on_gpu else 2048
    for kind in dict.fromkeys([dtype, torch.float32]):
        matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, kind)
        out = torch.empty_like(matrix)

        def product(matrix: Tensor = matrix, out: Tensor = out) -> Tensor:
            return torch.mm(matrix, matrix, out=out)

        found[f"gemm_{name_of(kind)}_flop_per_s"] = 2 * size**3 / seconds_of(product, device, 5, min)
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
