"""Triton's interpreter without work that it repeats: three quarters of its time in our tests, and
no result changes.

But one: products of matrices are summed in 64 bits, then rounded. In 32 the order of summing is
that of the kernel that numpy's BLAS has for a shape, so that on some CPUs a row has other bits
beside more rows; on a GPU it has not.

It replaces the functions of the language by its own at each launch, and again at each call of a
device function (`tl.sum` is one), for which it looks at all attributes of all classes. Here it does
so once for a launch, and remembers which attributes those are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

_REPLACED = "_patch_lang", "_patch_builtin", "_LangPatchScope", "_get_np_dtype"


def replace_once() -> None:
    """For all launches from now on. What is not as in the interpreter that we know stays as it is."""
    from triton import language
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in _REPLACED) or not hasattr(
        language.core, "tensor_descriptor_base"
    ):
        return
    plain, done = interpreter._patch_lang, set[int]()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """What a launch ends by `restore`; nobody restores what a device function began."""

        def restore(self) -> None:
            super().restore()
            done.clear()

    @functools.cache
    def languages(fn: Callable[..., Any]) -> frozenset[int]:
        return frozenset(
            id(value)
            for value in fn.__globals__.values()
            if value is language or value is language.core
        )

    @functools.cache
    def builtins(package: Any) -> list[str]:
        return [
            name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)
        ]

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if language.core.is_builtin(
                member
            ):  # else it has been replaced by a function that was called before
                interpreter._patch_attr(package, name, member, builder, scope)

    plain_dtype = interpreter._get_np_dtype
    scalars: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        """Without making a table of all types for each operation."""
        of = kind.element_ty if isinstance(kind, language.block_type) else kind
        if isinstance(of, language.pointer_type):
            return plain_dtype(of)
        if of.name not in scalars:
            scalars[of.name] = plain_dtype(of)
        return scalars[of.name]

    def replace(fn: Callable[..., Any]) -> Any:
        wanted = languages(fn)
        if done and wanted <= done:
            return Scope()
        scope = plain(fn)
        done.update(wanted)
        return scope

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if d.data.dtype != np.float32 or not all(
            each.data.dtype in (np.float16, np.float32) for each in (a, b)
        ):
            return plain_dot(self, a, b, d, *how)
        summed = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(summed.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot
    for package in (
        language,
        language.core,
        language.tensor,
        language.math,
        language.core.tensor_descriptor_base,
    ):
        builtins(package)  # before any of them is replaced
    for name, ours in zip(_REPLACED, (replace, replace_builtins, Scope, np_dtype), strict=True):
        setattr(interpreter, name, ours)
