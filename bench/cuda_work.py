"""A CUDA program without a compiler: each way of making contexts, loading code and launching it.

    python bench/cuda_work.py calls|slots|cost|torch LIBRARY FOLDER

Run by bench/cuda_check.py. It prints a JSON line for each thing it did, waits for a line of input
before the first, and for the end of its input after the last. The kernel is a vector addition in
PTX, under another name for each way. Images that it loads are kept in FOLDER. ``torch`` trains a
small network for a moment instead, and lets PyTorch's own profiler count its launches.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import sys
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.cuda_driver import (  # noqa: E402
    BLOCK,
    COUNT,
    CTX_CREATE_BYPASS,
    CUDART_INTERFACE,
    Cuda,
    Failed,
    fatbin,
    say,
    text,
    wrapped,
)

LAUNCHES = 1000
COST_LAUNCHES = 20_000
NODE = struct.Struct("<Q7I4xQQQQ")
"""CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""
INPUT_PTX = 1
SM_RESOURCE = 1
GRAPH_LAUNCHES = 25

# -------------------------------------------------------------------- contexts


def contexts(cuda: Cuda) -> None:
    """Each kind, made and ended."""
    device = cuda.device
    ways: dict[str, tuple[Any, ...]] = {
        "cuCtxCreate_v2": (c_uint(0), device),
        "cuCtxCreate_v3": (None, 0, c_uint(0), device),
        "cuCtxCreate_v4": (None, c_uint(0), device),
    }
    for name, arguments in ways.items():
        if not cuda.has(name):
            say(did="context", function=name, missing=True)
            continue
        handle = c_void_p()
        result = cuda.call(name, byref(handle), *arguments)
        say(did="context", function=name, result=result, handle=handle.value)
        if not result:
            ended = cuda.call("cuCtxDestroy_v2", handle)
            say(did="context", function="cuCtxDestroy_v2", result=ended, handle=handle.value)
    green_context(cuda)


def green_context(cuda: Cuda) -> None:
    name = "cuGreenCtxCreate"
    if not cuda.has(name):
        say(did="context", function=name, missing=True)
        return
    resource, description = ctypes.create_string_buffer(1024), c_void_p()
    green, context = c_void_p(), c_void_p()
    result = cuda.call("cuDeviceGetDevResource", cuda.device, resource, SM_RESOURCE)
    result = result or cuda.call(
        "cuDevResourceGenerateDesc", byref(description), resource, c_uint(1)
    )
    result = result or cuda.call(name, byref(green), description, cuda.device, c_uint(1))
    say(did="context", function=name, result=result, handle=green.value)
    if result:
        return
    result = cuda.call("cuCtxFromGreenCtx", byref(context), green)
    say(did="context", function="cuCtxFromGreenCtx", result=result, handle=context.value)
    say(did="context", function="cuGreenCtxDestroy", result=cuda.call("cuGreenCtxDestroy", green))


def primary(cuda: Cuda) -> None:
    """Retained twice, as libraries beside each other do, and current from now on."""
    for _ in range(2):
        handle = c_void_p()
        result = cuda.call("cuDevicePrimaryCtxRetain", byref(handle), cuda.device)
        say(
            did="context",
            function="cuDevicePrimaryCtxRetain",
            result=result,
            handle=handle.value,
        )
    cuda.need("cuCtxSetCurrent", handle)


# -------------------------------------------------------------------- loads


def load(cuda: Cuda, function: str, kernel: str, image: bytes, *, wrap: bool = False) -> c_void_p:
    """Loads an image by a function and gives its kernel; what was done is told."""
    path = cuda.keep(f"{kernel}.image", image)
    held = ctypes.create_string_buffer(image, len(image))
    wrapper = wrapped(ctypes.addressof(held))
    given: Any = wrapper if wrap else held
    if function in ("cuModuleLoad", "cuLibraryLoadFromFile"):
        given = c_char_p(path.encode())
    handle, found = c_void_p(), c_void_p()
    is_library = function.startswith("cuLibrary")
    rest: tuple[Any, ...] = ()
    if is_library:
        rest = (None, None, c_uint(0)) * 2
    elif function == "cuModuleLoadDataEx":
        rest = (c_uint(0), None, None)
    result = cuda.call(function, byref(handle), given, *rest)
    say(
        did="load", function=function, result=result, handle=handle.value, image=path, kernel=kernel
    )
    if not result:
        named = "cuLibraryGetKernel" if is_library else "cuModuleGetFunction"
        cuda.call(named, byref(found), handle, kernel.encode())
    return found


def linked(cuda: Cuda, kernel: str) -> bytes:
    """What the driver's linker makes of PTX: a cubin."""
    state, out, size = c_void_p(), c_void_p(), c_size_t()
    image = text(kernel)
    result = cuda.call("cuLinkCreate_v2", c_uint(0), None, None, byref(state))
    if result:
        say(did="load", function="cuLinkCreate_v2", result=result, kernel="")
        return b""
    result = cuda.call(
        *("cuLinkAddData_v2", state, INPUT_PTX, image, c_size_t(len(image)), b"linked"),
        *(c_uint(0), None, None),
    )
    path = cuda.keep(f"{kernel}.added", image)
    say(did="load", function="cuLinkAddData_v2", result=result, image=path, kernel="")
    cubin = b""
    if not cuda.call("cuLinkComplete", state, byref(out), byref(size)) and out.value:
        cubin = ctypes.string_at(out.value, size.value)
        path = cuda.keep(f"{kernel}.linked", cubin)
        say(did="load", function="cuLinkComplete", result=0, image=path, kernel="")
    cuda.call("cuLinkDestroy", state)
    return cubin


def loads(cuda: Cuda) -> dict[str, c_void_p]:
    """Each form of image by each function: kernel → its handle."""
    kernels: dict[str, c_void_p] = {}
    for function in ("cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoad"):
        kernel = f"add_{function}"
        kernels[kernel] = load(cuda, function, kernel, text(kernel))
    for function in ("cuLibraryLoadData", "cuLibraryLoadFromFile"):
        if not cuda.has(function):
            say(did="load", function=function, missing=True)
            continue
        kernel = f"add_{function}"
        kernels[kernel] = load(cuda, function, kernel, text(kernel))
    for kernel, function in (
        *(("add_cubin", "cuModuleLoadData"), ("add_fatbin", "cuModuleLoadFatBinary")),
        ("add_wrapper", "cuModuleLoadData"),
    ):
        image = linked(cuda, kernel)
        if image and kernel != "add_cubin":
            image = fatbin(image, cuda.arch)
        if image:
            wrap = kernel == "add_wrapper"
            kernels[kernel] = load(cuda, function, kernel, image, wrap=wrap)
    return kernels


# -------------------------------------------------------------------- launches


def launches(cuda: Cuda, kernels: dict[str, c_void_p]) -> None:
    """Every kernel by cuLaunchKernel, and one a function for the others; then a graph."""
    for index, (kernel, handle) in enumerate(kernels.items()):
        if handle.value:
            times = LAUNCHES + index
            result = cuda.launch("cuLaunchKernel", handle, times)
            say(did="launch", function="cuLaunchKernel", kernel=kernel, times=times, result=result)
    others = (
        *("cuLaunchKernel_ptsz", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"),
        *("cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz"),
    )
    for index, function in enumerate(others):
        kernel = f"by_{function}"
        if not cuda.has(function):
            say(did="launch", function=function, missing=True)
            continue
        handle = load(cuda, "cuModuleLoadData", kernel, text(kernel))
        times = 100 + index
        result = cuda.launch(function, handle, times)
        say(did="launch", function=function, kernel=kernel, times=times, result=result)
    graph_launches(cuda, kernels["add_cuModuleLoadData"])


def graph_launches(cuda: Cuda, kernel: c_void_p) -> None:
    graph, node, instance = c_void_p(), c_void_p(), c_void_p()
    data = NODE.pack(
        kernel.value or 0, COUNT // BLOCK, 1, 1, BLOCK, 1, 1, 0,
        ctypes.addressof(cuda.parameters), 0, 0, 0,
    )  # fmt: skip
    parameters = ctypes.create_string_buffer(data, len(data))
    result = cuda.call("cuGraphCreate", byref(graph), c_uint(0))
    result = result or cuda.call(
        "cuGraphAddKernelNode_v2", byref(node), graph, None, c_size_t(0), parameters
    )
    result = result or cuda.call("cuGraphInstantiateWithFlags", byref(instance), graph, c_uint64(0))
    for _ in range(GRAPH_LAUNCHES):
        result = result or cuda.call("cuGraphLaunch", instance, None)
    result = result or cuda.call("cuCtxSynchronize")
    say(did="graph", function="cuGraphLaunch", times=GRAPH_LAUNCHES, result=result)


# -------------------------------------------------------------------- the programs


def calls(cuda: Cuda) -> None:
    contexts(cuda)
    primary(cuda)
    cuda.fill()
    launches(cuda, loads(cuda))
    say(did="result", right=cuda.sums_are_right())
    cuda.close()


def slots(cuda: Cuda) -> None:
    """What runtime libraries call, by numbers measured with drivers 470 to 555."""
    primary(cuda)
    load_slot = cuda.slot(CUDART_INTERFACE, 1)
    image = fatbin(text("add_slot"), cuda.arch)
    path = cuda.keep("add_slot.image", image)
    if load_slot is not None:
        held, module = ctypes.create_string_buffer(image, len(image)), c_void_p()
        wrapper = wrapped(ctypes.addressof(held))
        by = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)(load_slot)
        result = by(ctypes.addressof(module), ctypes.addressof(wrapper))
        say(
            did="load",
            function="CUDART_INTERFACE[1]",
            result=result,
            handle=module.value,
            image=path,
            kernel="add_slot",
        )
    create_slot = cuda.slot(CTX_CREATE_BYPASS, 1)
    if create_slot is not None:
        context = c_void_p()
        by = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint, c_int)(create_slot)
        result = by(ctypes.addressof(context), 0, cuda.device)
        say(did="context", function="CTX_CREATE_BYPASS[1]", result=result, handle=context.value)


def cost(cuda: Cuda) -> None:
    """Nanoseconds a launch by this interpreter, told again for each line of input."""
    primary(cuda)
    cuda.fill()
    kernel = load(cuda, "cuModuleLoadData", "add_cost", text("add_cost"))
    cuda.launch("cuLaunchKernel", kernel, LAUNCHES)
    while True:
        begun = time.perf_counter_ns()
        cuda.launch("cuLaunchKernel", kernel, COST_LAUNCHES)
        say(did="cost", ns=(time.perf_counter_ns() - begun) / COST_LAUNCHES)
        if not sys.stdin.readline().strip():
            return


def torch_training() -> None:
    try:
        torch = importlib.import_module("torch")
        profiler = importlib.import_module("torch.profiler")
    except ImportError as error:
        raise Failed(f"PyTorch cannot be imported: {error}") from None
    if not torch.cuda.is_available():
        raise Failed("PyTorch finds no GPU")
    say(ready=True, driver=torch.version.cuda, gpu=torch.cuda.get_device_name(0), prologues={})
    sys.stdin.readline()
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=activities) as profiled:
        network = torch.nn.Sequential(
            torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)
        ).cuda()
        optimizer = torch.optim.AdamW(network.parameters())
        data = torch.randn(256, 512, device="cuda")
        for _ in range(100):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(network(data), data).backward()
            optimizer.step()
        torch.cuda.synchronize()
    counted = sum(
        event.count
        for event in profiled.key_averages()
        if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    )
    say(did="torch", launches=counted)
    say(done=True)
    sys.stdin.read()


def main() -> int:
    kind, library, folder = sys.argv[1:4]
    try:
        if kind == "torch":
            torch_training()
            return 0
        cuda = Cuda(library, Path(folder))
        say(ready=True, driver=cuda.version, gpu=cuda.gpu, prologues=cuda.prologues())
        sys.stdin.readline()
        {"calls": calls, "slots": slots, "cost": cost}[kind](cuda)
    except Failed as error:
        say(failed=str(error))
        return 2
    say(done=True)
    # What it holds is looked at until it is told to end; what a driver does at exit is no matter.
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
