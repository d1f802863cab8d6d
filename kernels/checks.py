"""Shape checks of the public operators."""

from typing import overload

from torch import Tensor

from draftwood.kernels.tables import TreeTables


class Shapes:
    """Checks tensors of one operator against named sizes; a letter is bound by the first tensor that uses it."""

    def __init__(self, operator: str, tables: TreeTables):
        self.operator = operator
        self.sizes = {"N": tables.num_nodes}

    def check(self, name: str, tensor: Tensor | None, letters: str) -> None:
        """`tensor` [letters, separated by spaces]; None is an optional argument left out.

        Raises:
            ValueError: the tensor has another number of dimensions, or a letter had another size before.
        """
        if tensor is None:
            return
        expected = letters.split()
        shape = list(tensor.shape)
        matches = len(shape) == len(expected) and all(
            self.sizes.setdefault(letter, size) == size for letter, size in zip(expected, shape, strict=True)
        )
        if not matches:
            known = ", ".join(f"{letter} = {self.sizes[letter]}" for letter in expected if letter in self.sizes)
            raise ValueError(
                f"{self.operator}: {name} has shape {shape}, expected [{', '.join(expected)}] with {known}"
            )

    def divides(self, part: str, whole: str) -> None:
        """Raises ValueError where the size `part` does not divide the size `whole`."""
        if self.sizes[whole] % self.sizes[part]:
            raise ValueError(
                f"{self.operator}: {part} = {self.sizes[part]} does not divide {whole} = {self.sizes[whole]}"
            )

    def rows(self, tables: TreeTables) -> None:
        """Raises ValueError where the tables are for another number of rows than the batch (or one for all)."""
        if tables.num_rows not in (1, self.sizes["B"]):
            raise ValueError(f"{self.operator}: {tables.num_rows} trees for a batch of {self.sizes['B']} rows")


@overload
def blank(tensor: Tensor, valid: Tensor | None, node_dim: int = 1) -> Tensor: ...
@overload
def blank(tensor: None, valid: Tensor | None, node_dim: int = 1) -> None: ...
def blank(tensor: Tensor | None, valid: Tensor | None, node_dim: int = 1) -> Tensor | None:
    """`tensor` with zeros at the nodes that are not valid (whatever they held, NaN included); the same where all are.

    Args:
        tensor: [B, ..., N, ...] with the nodes in dimension `node_dim`, or None.
        valid: [B, N] bool, or None.
    """
    if tensor is None or valid is None:
        return tensor
    shape = [1] * tensor.ndim
    shape[0], shape[node_dim] = valid.shape
    return tensor.masked_fill(~valid.view(shape), 0.0)
