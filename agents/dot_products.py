"""Dot products on eight lanes, whose sums do not depend on what a compiler makes of them.

Lane k adds up the products k, k + 8, …; lanes are added in pairs, what is left over one by one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
FLOAT, SIZE = ir.FloatType(), 4  # bytes
LANES_TYPE = ir.VectorType(FLOAT, LANES)


def _declaration(rows: int) -> Any:
    """Return what adds the products of x [F] and so many rows of a matrix [rows, F] to y [rows]."""

    def declare(typing_context: Any, x: Any, matrix: Any, count: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            x, matrix, count, y = values
            x, matrix, y = (builder.inttoptr(at, FLOAT.as_pointer()) for at in (x, matrix, y))
            _add_products(builder, rows, x, matrix, count, y)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 4), generate

    return declare


def _add_products(builder: Any, rows: int, x: Any, matrix: Any, count: Any, y: Any) -> None:
    whole = builder.and_(count, ir.Constant(count.type, -LANES))
    begins = [builder.mul(count, ir.Constant(count.type, row)) for row in range(rows)]
    nothing = ir.Constant(LANES_TYPE, [0.0] * LANES)
    sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(rows)]
    step, zero = (ir.Constant(count.type, number) for number in (LANES, 0))
    with cgutils.for_range_slice(builder, zero, whole, step) as (i, _):
        given = _lanes(builder, x, i)
        for begin, total in zip(begins, sums, strict=True):
            products = builder.fmul(given, _lanes(builder, matrix, builder.add(begin, i)))
            builder.store(builder.fadd(builder.load(total), products), total)
    ends = [cgutils.alloca_once_value(builder, _in_pairs(builder, builder.load(s))) for s in sums]
    with cgutils.for_range_slice(builder, whole, count, ir.Constant(count.type, 1)) as (i, _):
        given = builder.load(builder.gep(x, [i]))
        for begin, total in zip(begins, ends, strict=True):
            weight = builder.load(builder.gep(matrix, [builder.add(begin, i)]))
            builder.store(builder.fadd(builder.load(total), builder.fmul(given, weight)), total)
    for row, total in enumerate(ends):
        place = builder.gep(y, [ir.Constant(count.type, row)])
        builder.store(builder.fadd(builder.load(place), builder.load(total)), place)


def _lanes(builder: Any, array: Any, at: Any) -> Any:
    place = builder.bitcast(builder.gep(array, [at]), LANES_TYPE.as_pointer())
    return builder.load(place, align=SIZE)


def _in_pairs(builder: Any, lanes: Any) -> Any:
    index = [ir.Constant(ir.IntType(32), lane) for lane in range(LANES)]
    parts = [builder.extract_element(lanes, lane) for lane in index]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [builder.fadd(parts[k], parts[k + half]) for k in range(half)]
    return parts[0]


# In compiled code: add_products(x, matrix, count, y), with addresses of float32 numbers.
add_four_products: Any = intrinsic(_declaration(4))
add_one_product: Any = intrinsic(_declaration(1))
