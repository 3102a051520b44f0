"""Inductor's lowering of a matrix product: a call of the code in product.h."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from steadyrl.agents.engine.graphs.wide_products import CODE
from steadyrl.core.gates.torch_private import COMPILER, TORCH

CppTemplate: Any = TORCH[f"{COMPILER}.codegen.cpp_template.CppTemplate"]
ExternKernel, FixedLayout, parallel_num_threads = (
    TORCH[f"{COMPILER}.{name}"]
    for name in ("ir.ExternKernel", "ir.FixedLayout", "utils.parallel_num_threads")
)

CALL = """
extern "C" {head}
{{
    steadyrl::multiply({left}, {right}, {sums}, {pairs}, {threads});
}}
"""


def lower_product(left: Any, right: Any) -> Any:
    """Return Inductor's node of left @ right, for matrices or batches of them."""
    given = [ExternKernel.realize_input(each) for each in (left, right)]
    size = [*left.get_size()[:-1], right.get_size()[-1]]
    layout = FixedLayout(device=left.get_device(), dtype=left.get_dtype(), size=size)
    return Product(given, layout).generate().output_node()


class Product(CppTemplate):  # type: ignore[misc]
    """The generated code of one product."""

    def __init__(self, given: list[Any], layout: Any) -> None:
        super().__init__("product", given, layout, parallel_num_threads())

    @override
    def render(self, **given: Any) -> str:
        """Return the function's code; the compiler passes its output buffer once it is known."""
        kernel, (left, right) = given["kernel"], self.input_nodes
        sums: Any = given.get("template_buffer_node") or self.output_node
        head = kernel.def_kernel(inputs={"left": left, "right": right}, outputs={"sums": sums})
        arguments = {
            "left": _matrix_arguments(kernel, left),
            "right": _matrix_arguments(kernel, right),
            "sums": kernel.args.output(sums.get_name()),
            "pairs": kernel.size(sums, 0) if len(sums.get_size()) > 2 else 1,
        }
        call = CALL.format(head=head, threads=self.num_threads, **arguments)
        return "\n".join((self.header().getvalue(), CODE.read_text("utf-8"), call))


def _matrix_arguments(kernel: Any, matrices: Any) -> str:
    """Return the arguments of a matrix, or of a batch's first one and the batch stride."""
    sides = len(matrices.get_size())
    two = sides - 2, sides - 1
    size, stride = ([part(matrices, side) for side in two] for part in (kernel.size, kernel.stride))
    apart = kernel.stride(matrices, 0) if sides > 2 else 0
    first = kernel.index(matrices, [0] * sides)
    matrix = ", ".join((f"&{first}", *size, *stride))
    return f"{{{matrix}}}, {apart}"
