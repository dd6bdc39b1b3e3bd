"""A kernel as text, in the language that it is asked for."""

from __future__ import annotations

from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.codegen.triton.render import render_triton
from aottrain.errors import ConfigError
from aottrain.ir.kernels.kernel import KernelIR

_RENDERERS = {"cpp": render_cpp, "triton": render_triton}


def render(kernel: KernelIR, language: str = "cpp") -> str:
    """The source of one kernel: a C++ function for "cpp", a Python module for "triton". Neither needs a device."""
    if language not in _RENDERERS:
        raise ConfigError(f"language={language!r} is none of {', '.join(_RENDERERS)}")
    return _RENDERERS[language](kernel)
