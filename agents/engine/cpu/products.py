"""Vector–matrix products whose order of summation does not depend on the compiler.

Dot products use eight lanes: lane k sums products k, k + 8, …; lanes are then added pairwise, and
the remainder one by one. For the other weight layout, sums run over inputs. Every product is added
by a fused multiply–add, rounded once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from steadyrl.core.gates.numba_private import cgutils

LANES, MANY, ROWS_AT_ONCE = 8, 64, 4
FLOAT, SIZE = ir.FloatType(), 4  # bytes
LANES_TYPE, ONE_LANE = ir.VectorType(FLOAT, LANES), ir.VectorType(FLOAT, 1)


def _declaration(rows: int) -> Any:
    """Declare: add the products of x [F] and `rows` rows of a matrix [rows, F] to y [rows]."""

    def declare(typing_context: Any, x: Any, matrix: Any, count: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            x, matrix, count, y = values
            x, matrix, y = (builder.inttoptr(at, FLOAT.as_pointer()) for at in (x, matrix, y))
            _add_products(builder, [x], rows, matrix, count, [y])
            return context.get_dummy_value()

        return types.none(*[types.int64] * 4), generate

    return declare


def _declaration_of_each(many: int, rows: int) -> Any:
    """Declare: add the products of x [many, F] and `rows` rows of a matrix to y [many, rows].

    Row strides of x and y are in bytes.
    """

    def declare(
        typing_context: Any, x: Any, matrix: Any, count: Any, y: Any, row_stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            x, matrix, count, y, row_stride = values
            places = [
                builder.mul(row_stride, ir.Constant(row_stride.type, one)) for one in range(many)
            ]
            xs, ys = (
                [builder.inttoptr(builder.add(at, place), FLOAT.as_pointer()) for place in places]
                for at in (x, y)
            )
            matrix = builder.inttoptr(matrix, FLOAT.as_pointer())
            _add_products(builder, xs, rows, matrix, count, ys)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), generate

    return declare


def _add_products(builder: Any, xs: Any, rows: int, matrix: Any, count: Any, ys: Any) -> None:
    whole = builder.and_(count, ir.Constant(count.type, -LANES))
    begins = [builder.mul(count, ir.Constant(count.type, row)) for row in range(rows)]
    nothing = ir.Constant(LANES_TYPE, [0.0] * LANES)
    sums = [[cgutils.alloca_once_value(builder, nothing) for _ in begins] for _ in xs]
    step, zero = (ir.Constant(count.type, number) for number in (LANES, 0))

    def add(i: Any, into: Any, kind: Any) -> None:
        weights = [_lanes(builder, matrix, builder.add(begin, i), kind) for begin in begins]
        for x, totals in zip(xs, into, strict=True):
            given = _lanes(builder, x, i, kind)
            for weight, total in zip(weights, totals, strict=True):
                builder.store(_fma(builder, given, weight, builder.load(total)), total)

    with cgutils.for_range_slice(builder, zero, whole, step) as (i, _):
        add(i, sums, LANES_TYPE)
    ends = [
        [cgutils.alloca_once_value(builder, _in_pairs(builder, builder.load(s))) for s in each]
        for each in sums
    ]
    with cgutils.for_range_slice(builder, whole, count, ir.Constant(count.type, 1)) as (i, _):
        add(i, ends, FLOAT)
    for y, totals in zip(ys, ends, strict=True):
        for row, total in enumerate(totals):
            place = builder.gep(y, [ir.Constant(count.type, row)])
            builder.store(builder.fadd(builder.load(place), builder.load(total)), place)


def _fma(builder: Any, one: Any, other: Any, more: Any) -> Any:
    """Return one · other + more, rounded once."""
    kind = one.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), name
    )
    return builder.call(function, (one, other, more))


def _lanes(builder: Any, array: Any, at: Any, kind: Any) -> Any:
    return builder.load(_place(builder, array, at, kind), align=SIZE)


def _place(builder: Any, array: Any, at: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(array, [at]), kind.as_pointer())


def _in_pairs(builder: Any, lanes: Any) -> Any:
    index = [ir.Constant(ir.IntType(32), lane) for lane in range(LANES)]
    parts = [builder.extract_element(lanes, lane) for lane in index]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [builder.fadd(parts[k], parts[k + half]) for k in range(half)]
    return parts[0]


def _declaration_by_inputs(columns: int) -> Any:
    """Declare: add x [in] times `columns` columns of a weight [in, out] to as many of y [out]."""
    # No 512-bit vectors: after using them the CPU lowers its clock for a while.
    kind = ir.VectorType(FLOAT, min(columns, LANES))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
    begins = [ir.Constant(ir.IntType(64), at) for at in range(0, columns, kind.count)]

    def declare(typing_context: Any, x: Any, inputs: Any, weight: Any, outputs: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            x, inputs, weight, outputs, y = values
            x, weight, y = (builder.inttoptr(at, FLOAT.as_pointer()) for at in (x, weight, y))
            sums = [
                cgutils.alloca_once_value(builder, _lanes(builder, y, at, kind)) for at in begins
            ]
            with cgutils.for_range(builder, inputs) as loop:
                given = _lanes(builder, x, loop.index, ONE_LANE)
                given = builder.shuffle_vector(given, given, zeros)
                row = builder.gep(weight, [builder.mul(loop.index, outputs)])
                for at, total in zip(begins, sums, strict=True):
                    weights = _lanes(builder, row, at, kind)
                    builder.store(_fma(builder, given, weights, builder.load(total)), total)
            for at, total in zip(begins, sums, strict=True):
                builder.store(builder.load(total), _place(builder, y, at, kind), align=SIZE)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), generate

    return declare


def _declare_multiple(typing_context: Any, number: Any, x: Any, count: Any, y: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number, x, count, y = values
        x, y = (builder.inttoptr(at, FLOAT.as_pointer()) for at in (x, y))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
        one = builder.bitcast(number, ONE_LANE)
        whole = builder.and_(count, ir.Constant(count.type, -LANES))
        begin, step, single = (ir.Constant(count.type, at) for at in (0, LANES, 1))

        def add(i: Any, number: Any, kind: Any) -> None:
            total = _fma(builder, number, _lanes(builder, x, i, kind), _lanes(builder, y, i, kind))
            builder.store(total, _place(builder, y, i, kind), align=SIZE)

        with cgutils.for_range_slice(builder, begin, whole, step) as (i, _):
            add(i, builder.shuffle_vector(one, one, zeros), LANES_TYPE)
        with cgutils.for_range_slice(builder, whole, count, single) as (i, _):
            add(i, number, FLOAT)
        return context.get_dummy_value()

    return types.none(types.float32, *[types.int64] * 3), generate


# In compiled code: add_products(x, matrix, count, y), with addresses of float32 arrays.
add_four_products: Any = intrinsic(_declaration(4))
add_one_product: Any = intrinsic(_declaration(1))
# (x, matrix, count, y, row_stride), for `ROWS_AT_ONCE` rows of x and y.
add_two_products_of_each: Any = intrinsic(_declaration_of_each(ROWS_AT_ONCE, 2))
# add_multiple(number, x, count, y): adds number · x to y [count].
add_multiple: Any = intrinsic(_declare_multiple)
# add_inputs(x, inputs, weight, outputs, y), for columns beginning at weight and y.
add_inputs_to_many: Any = intrinsic(_declaration_by_inputs(MANY))
add_inputs_to_eight: Any = intrinsic(_declaration_by_inputs(LANES))
add_inputs_to_one: Any = intrinsic(_declaration_by_inputs(1))


def _declare_fma(typing_context: Any, one: Any, other: Any, more: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _fma(builder, *values)

    return types.float32(*[types.float32] * 3), generate


fma: Any = intrinsic(_declare_fma)  # (one, other, more): one · other + more
