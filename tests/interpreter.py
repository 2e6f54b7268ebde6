"""Triton's interpreter as the tests run it: bf16 as a GPU computes it, and each operation in a fraction of the time."""

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

SEMANTIC = interpreter.interpreter_semantic
ROUND_NEAREST = interpreter._ir.ROUNDING_MODE.RTNE


def mend_interpreter() -> None:
    """Make interpreted bf16 arithmetic equal torch's; where this Triton is known, make operations take less time."""
    mend_bf16()
    if hasattr(interpreter, "_LangPatchScope"):
        patch_once_a_launch()
        reduce_by_halves()
        know_types()
        skip_wrappers()
        combine_operands()


def mend_bf16() -> None:
    """Multiply and round bf16 as a GPU does.

    Triton's interpreter keeps bf16 as uint16. It multiplies those raw bits in `tl.dot`, and truncates fp32 to bf16
    where the GPU rounds to nearest even; both are replaced here by what the GPU does.
    """
    convert = interpreter._convert_float

    def convert_float(data, input_dtype, output_dtype, rounding_mode):
        if input_dtype == tl.bfloat16 and output_dtype == tl.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if input_dtype == tl.float32 and output_dtype == tl.bfloat16 and rounding_mode in (None, ROUND_NEAREST):
            bits = data.view(np.uint32)
            nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
            if (nan := np.isnan(data)).any():
                nearest[nan] = 0x7FC0
            return nearest
        return convert(data, input_dtype, output_dtype, rounding_mode)

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot_bf16(self, a, b, d, input_precision, max_num_imprecise_acc):
        return create_dot(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot_bf16


def patch_once_a_launch() -> None:
    """The language's functions are replaced once a launch, where Triton does it at each call of a device function."""
    patch_lang, launch, languages_of = interpreter._patch_lang, {}, {}

    def patch_once(fn):
        if fn not in languages_of:
            languages_of[fn] = frozenset(id(each) for each in fn.__globals__.values() if each is tl or each is tl.core)
        languages = languages_of[fn]
        if languages in launch:
            return interpreter._LangPatchScope()
        scope = launch[languages] = patch_lang(fn)
        if len(launch) == 1:  # of the kernel itself: with it ends what its device functions had replaced
            restore = scope.restore

            def restore_all():
                for other in reversed(list(launch.values())[1:]):
                    other.restore()
                launch.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


def reduce_by_halves() -> None:
    """Reductions combine halves, as a GPU does, where Triton takes one number at a time."""
    reduce_each = interpreter.ReduceOps.generic_reduce

    def reduce(self, given):
        if self.axis is None:
            return reduce_each(self, given)
        dtypes = [each.dtype for each in given]
        parts = [np.moveaxis(each.handle.data, self.axis, 0) for each in given]
        while (half := len(parts[0]) // 2) > 0:
            halves = [part[at] for at in (slice(half), slice(half, None)) for part in parts]
            made = self.combine_fn.fn(*map(self.to_tensor, halves, dtypes * 2))
            parts = [each.handle.data for each in (made if isinstance(made, tuple) else (made,))]
        parts = [np.expand_dims(part[0], self.axis) if self.keep_dims else part[0] for part in parts]
        return list(map(self.to_tensor, parts, dtypes))

    interpreter.ReduceOps.generic_reduce = reduce


def know_types() -> None:
    """Cache results that depend only on a type or its shape, in place of computing them at each operation."""
    np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def known_np_dtype(dtype):
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    block_type_init, block_types = tl.block_type.__init__, {}

    def init_block_type(self, element_ty, shape):
        key = tuple(shape.values if type(shape) is tl.tuple else shape), element_ty.name
        if key not in block_types:
            block_type_init(self, element_ty, shape)
            block_types[key] = self.shape, self.numel, self.name
        self.element_ty, (self.shape, self.numel, self.name) = element_ty, block_types[key]

    tensor_init, tensors = tl.tensor.__init__, {}

    def init_tensor(self, handle, type):
        if type.name not in tensors:
            tensor_init(self, handle, type)
            tensors[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[type.name]

    unwrap, plain = tl.core._unwrap_if_constexpr, {tl.tensor, tl.dtype, tl.pointer_type, int, float, bool, type(None)}

    def unwrap_few(value):
        kind = type(value)
        return value.value if kind is tl.constexpr else value if kind in plain else unwrap(value)

    equal = tl.dtype.__eq__

    def is_same(self, other):
        return self is other or equal(self, other)

    validate, valid = interpreter.TensorHandle.__post_init__, set()

    def init_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if (key := (data.itemsize, dtype.name)) not in valid:
            validate(self)
            valid.add(key)

    interpreter._get_np_dtype, interpreter.TensorHandle.__init__ = known_np_dtype, init_handle
    tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__ = init_block_type, init_tensor, is_same
    tl.core._unwrap_if_constexpr = unwrap_few


def skip_wrappers() -> None:
    """The language's functions are looked for once, and get their semantics without being asked whether they have."""
    wrapped, members = tl.core.builtin(lambda: None).__code__, {}

    def with_semantic(member):
        while getattr(member, "__code__", None) is wrapped:
            member = member.__wrapped__

        def call(*args, **kwargs):
            kwargs["_semantic"] = SEMANTIC
            return member(*args, **kwargs)

        return call

    def patch_builtin(package, builder, scope):
        if package not in members:
            every = inspect.getmembers(package, tl.core.is_builtin)
            members[package] = [(name, with_semantic(member)) for name, member in every]
        for name, call in members[package]:
            scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch_builtin


class Operands(NamedTuple):
    """Result types of an operation on two operands of known types, and the range of a scalar among them."""

    left: tl.dtype
    right: tl.dtype
    least: float
    most: float


def combine_operands() -> None:
    """Operands' common type and shape are worked out once; NumPy broadcasts what an operation combines by itself.

    So of two combined operands the types say the shape that they come to, their arrays may be smaller.
    """
    semantic, check, known = SEMANTIC, SEMANTIC.binary_op_type_checking_impl, {}

    def kind(operand):
        return operand.type.name if isinstance(operand, tl.tensor) else semantic.to_tensor_type(operand)

    def as_type(operand, to):
        if not isinstance(operand, tl.tensor):
            operand = semantic.scalar_constant(operand, to.scalar)
        if operand.type.name == to.name:
            return operand
        if operand.dtype.name != to.scalar.name:
            operand = semantic.cast(operand, to.scalar)
        return operand if operand.type.name == to.name else tl.tensor(operand.handle, to)

    def combine(lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        given = [each for each in (lhs, rhs) if not isinstance(each, tl.tensor)]
        key = kind(lhs), kind(rhs), allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        plan = known.get(key)
        if plan is None or not all(plan.least <= each <= plan.most for each in given):
            left, right = check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            limits = -math.inf, math.inf
            if given and left.dtype.is_int():
                limits = left.dtype.get_int_min_value(), left.dtype.get_int_max_value()
            known[key] = Operands(left.type, right.type, *limits)
            return left, right
        return as_type(lhs, plan.left), as_type(rhs, plan.right)

    broadcast, shapes = semantic.broadcast_impl_value, {}

    def expand(operand, to):
        if operand.type.name == to.name:
            return operand
        data = np.broadcast_to(operand.handle.data, to.shape.values)
        return tl.tensor(interpreter.TensorHandle(data, to.scalar), to)

    def broadcast_known(lhs, rhs):
        key = lhs.type.name, rhs.type.name
        if key not in shapes:
            left, right = broadcast(lhs, rhs)
            shapes[key] = left.type, right.type
            return left, right
        return expand(lhs, shapes[key][0]), expand(rhs, shapes[key][1])

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = combine, broadcast_known
