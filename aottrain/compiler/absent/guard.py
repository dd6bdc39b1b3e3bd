"""CUDA tensors without memory, in a process that has no CUDA device.

Fake tensors on CUDA can be made by any build of torch. But autograd asks a guard for the current device and its stream,
which a build without CUDA has not, and that ends the process; it asks which accelerator there is, and a build for CUDA
whether that of no device is in use, which is an error. So both are told that there is a device 0 with one stream, on
which nothing ever runs. That holds for the whole process from then on, which is
therefore one that only plans.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from aottrain.errors import CompilerError, ConfigError
from aottrain.toolchain.native import Source, compiler_obstacle, require_all

# The hooks that `import torch` has made are kept, and have no data: their object is given the functions of ours.
_TEXT = """\
// torch %s
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
constexpr auto CUDA = DeviceType::CUDA;
struct AbsentGuard final : impl::NoOpDeviceGuardImpl<CUDA> {
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Device getDevice() const override { return Device(CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
struct AbsentHooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
extern "C" int set_guard() {
  auto& guard = impl::device_guard_impl_registry[static_cast<size_t>(CUDA)];
  auto* made = guard.load();
  if (made == nullptr || made->deviceCount() == 0) guard.store(new AbsentGuard());
  static AbsentHooks hooks;
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(kept) = *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&hooks));
  return at::detail::getCUDAHooks().isBuilt();
}
"""


# Of the oldest device that has a name here (`ir.settings.devices`), for models that choose by it how to compute.
_CAPABILITY = (8, 0)
_kernels = torch.library.Library("aten", "IMPL")


def require_cuda() -> None:
    """From now on this process takes CUDA to be there, and can run nothing on it; where a device is, nothing changes.

    ConfigError: the few lines of C++ that this takes cannot be compiled here.
    """
    if not torch.cuda.is_available():
        _pretend()


@cache
def _pretend() -> None:
    if obstacle := _obstacle():
        raise ConfigError(f"planning for CUDA on a machine without it: {obstacle}")
    # What has a kernel of its own on CUDA, and is taken apart where there is none.
    for name in ("_fused_rms_norm", "mish_backward"):
        _kernels.impl(name, _never, "CUDA")
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_capability = lambda *_, **__: _CAPABILITY


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this process plans for a CUDA device that is not there, and can run nothing on it")


def _obstacle() -> str:
    """Why the process cannot be told so; empty once it is."""
    if obstacle := compiler_obstacle():
        return obstacle
    folder = Path(torch.__file__).parent
    flags = ["-O0", "-std=c++20", f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
    flags += ["-Wl,--no-as-needed", "-lc10", "-ltorch_cpu"]  # named before the text that needs them
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    try:
        (library,) = require_all([Source(_TEXT % torch.__version__, tuple(flags), needs_cxx_library=True)])
    except CompilerError as error:
        return str(error)
    return "" if library.functions.set_guard() else f"{os.fspath(folder)} does not say that it has CUDA"
