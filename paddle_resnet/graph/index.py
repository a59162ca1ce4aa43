"""The producers and readers of the variables of a program, for passes that replace operators."""

from collections.abc import Iterable

from paddle import static

from paddle_resnet import graph

# Operators with which Paddle adds the gradients of a variable that has several readers.
GRADIENT_SUMS = ("sum", "grad_add")


class Graph:
    """The block of a program, the producer and the readers of each of its variables before the first replacement, and
    the operators that finish() removes."""

    def __init__(self, program):
        self.block = block = graph.block(program)
        self.producers, self.readers = {}, {}
        for op in block.ops:
            self.producers.update(dict.fromkeys(op.output_arg_names, op))
            for name in set(op.input_arg_names):
                self.readers.setdefault(name, []).append(op)
        fused_buffers = [op for op in block.ops if op.type == "coalesce_tensor"]
        self.coalesced = {name: op for op in fused_buffers for name in op.output("Output")}
        self.replaced = []

    def variables(self, op: graph.Operator, *names: str) -> dict[str, static.Variable]:
        """Return {name: variable} for the named inputs or outputs of an operator."""
        inputs = set(op.input_names)
        return {name: self.block.var((op.input if name in inputs else op.output)(name)[0]) for name in names}

    def only_reader(self, name: str, op_types: Iterable[str]) -> graph.Operator | None:
        """Return the operator outside the backward pass that reads a variable, or None if there is not exactly one such
        operator or its type is not in `op_types`."""
        readers = [op for op in self.readers.get(name, []) if not op.attr("op_role") & 1]
        return readers[0] if len(readers) == 1 and readers[0].type in op_types else None

    def gradient(self, op: graph.Operator, is_complete: bool = True) -> graph.Operator | None:
        """Return the gradient operator of an operator, or None if the operator has no gradient. If is_complete is true,
        also return None if the gradient operator omits some gradients, for example because layers are frozen."""
        out = op.output({"batch_norm": "Y", "conv2d": "Output", "depthwise_conv2d": "Output"}.get(op.type, "Out"))[0]
        grads = [reader for reader in self.readers.get(f"{out}@GRAD", []) if reader.type == f"{op.type}_grad"]
        if not grads or (is_complete and not all(map(grads[0].output, grads[0].output_names))):
            return None
        return grads[0]

    def output_or_unused(self, op: graph.Operator, name: str, like: static.Variable) -> static.Variable:
        """Return an output variable of an operator. If the operator does not have this output, return a new, unused
        variable with the shape and type of `like`."""
        if op.output(name):
            return self.block.var(op.output(name)[0])
        return self.block.create_var(name=f"{like.name}@GRAD@unused", shape=like.shape, dtype=like.dtype)

    def has_gradient(self, ops: list[graph.Operator]) -> bool:
        """Return whether the backward pass includes the gradient of at least one of the operators."""
        return any(f"{name}@GRAD" in self.readers for op in ops for name in op.output_arg_names)

    def is_before(self, first: graph.Operator, second: graph.Operator) -> bool:
        return self.block.ops.index(first) < self.block.ops.index(second)

    def summands(self, name: str) -> tuple[list[static.Variable], list[graph.Operator]]:
        """If a gradient is the sum of two variables and has only one reader, return ([the two variables], [the operator
        that adds them]); otherwise, return ([the gradient], [])."""
        producer = self.producers[name]
        summands = producer.input_arg_names
        adds = producer.type in GRADIENT_SUMS and len(summands) == 2 and len(self.readers[name]) == 1
        names, ops = (summands, [producer]) if adds else ([name], [])
        return [self.block.var(name) for name in names], ops

    def replace(
        self, ops: list[graph.Operator], at: graph.Operator, op_type: str, inputs: dict, outputs: dict, attrs: dict
    ) -> None:
        """Insert an operator before the operator `at`, with the role of `at`; finish() removes `ops`."""
        graph.insert_before(self.block, at, op_type, inputs, outputs, attrs)
        self.replaced += ops

    def finish(self) -> int:
        """Remove the operators that replace() has replaced, and return their number."""
        graph.remove(self.block, self.replaced)
        graph.sync(self.block)
        return len(self.replaced)
