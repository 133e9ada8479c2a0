"""Makes Triton's interpreter quicker: what it makes again for every call of a function and every tensor is made once and kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """From now on triton.language interprets, also between launches, and types of one name share their attributes."""
    prepare, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    block_type, tensor = tl.block_type.__init__, tl.tensor.__init__
    scopes: dict[Any, Any] = {}
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    sizes: dict[str | None, tuple[Any, Any]] = {}

    def bind(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, bound)

    def prepare_once(kernel: Callable[..., Any]) -> Any:
        names = kernel.__globals__.values()
        which = (any(value is tl for value in names), any(value is tl.core for value in names))
        if which not in scopes:
            scopes[which] = prepare(kernel)
            scopes[which]._changes.clear()  # nothing is restored after a launch
        return scopes[which]

    def dtype_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    def block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            block_type(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        name = type.name if type.is_block() else None
        if name not in sizes:
            tensor(self, handle, type)
            sizes[name] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes[name]

    builder = interpreter.interpreter_builder  # sums for an assertion on overflow, which is evaluated under `debug` alone
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_attr = bind  # without the wrappers that drop and demand _semantic at each call
    interpreter._patch_lang, interpreter._get_np_dtype = prepare_once, dtype_once
    tl.block_type.__init__, tl.tensor.__init__ = block_type_once, tensor_once
