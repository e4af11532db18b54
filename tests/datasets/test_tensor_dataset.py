import pytest
import torch

from sandmask.datasets import TensorDataset
from sandmask.errors import SandmaskError

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 0, 1, 0, 1])


def test_environments_are_numbered_through() -> None:
    data = TensorDataset("mine", ("a", "b"), ("no", "yes"), [(X[:4], Y[:4]), (X[4:], Y[4:])])
    assert data.bounds == (0, 4, 6)
    assert data.input_shape == (2,)
    assert torch.equal(data.inputs(torch.tensor([[5, 0], [1, 1]])), torch.stack([X[[5, 0]], X[[1, 1]]]))
    assert data.inputs(torch.tensor(3)).tolist() == X[3].tolist()
    assert data.inputs(torch.tensor([], dtype=torch.int64)).shape == (0, 2)


def test_bytes_become_shares() -> None:
    pixels = torch.tensor([[0], [51], [255]], dtype=torch.uint8)
    data = TensorDataset("mine", ("a",), ("no", "yes"), [(pixels, Y[:3])])
    assert data.inputs(torch.arange(3)).flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])


def test_works_under_vmap() -> None:
    data = TensorDataset("mine", ("a",), ("no", "yes"), [(X, Y)])
    indices = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert torch.equal(torch.func.vmap(data.inputs)(indices), data.inputs(indices))


@pytest.mark.parametrize(
    ("environments", "inputs", "labels", "message"),
    [
        (("a", "b"), X, Y, "2 environment names for 1"),
        (("a",), X[:3], Y, "3 inputs and 6 labels"),
        (("a",), X.double(), Y, "float32 or uint8"),
        (("a",), X[:, 0], Y, r"inputs should have the shape \[n, \.\.\.\]. Found \[6\]"),
        (("a",), X, Y + 1, r"labels should be in 0\.\.1"),
        (("a",), X[:0], Y[:0], "0 inputs"),
        (("a",), X.numpy(), Y, "should be tensors. Found ndarray"),
        (("a",), X, Y.tolist(), "should be tensors. Found list"),
        (("a",), X / 0, Y, "environment 'a': inputs contain NaN or inf"),
        (("a",), X, Y + 0.5, "labels should be whole numbers"),
        (("a",), X, Y[:, None], r"labels should be whole numbers, .* of shape \[n\]"),
    ],
)
def test_mistakes_are_named(
    environments: tuple[str, ...], inputs: torch.Tensor, labels: torch.Tensor, message: str
) -> None:
    with pytest.raises(SandmaskError, match=message):
        TensorDataset("mine", environments, ("no", "yes"), [(inputs, labels)])


def test_two_environments_of_one_name_are_refused() -> None:
    with pytest.raises(SandmaskError, match="mine: two environments have the same name: 'a', 'a'"):
        TensorDataset("mine", ("a", "a"), ("no", "yes"), [(X, Y), (X, Y)])


def test_two_classes_of_one_name_are_refused() -> None:
    """They would share a column in tables of classes."""
    with pytest.raises(SandmaskError, match="mine: two classes have the same name: 'no', 'no'"):
        TensorDataset("mine", ("a",), ("no", "no"), [(X, Y)])


@pytest.mark.parametrize("labels", [Y.float(), Y.bool(), Y.to(torch.uint8)])
def test_labels_of_other_types_are_numbers_of_classes(labels: torch.Tensor) -> None:
    assert torch.equal(TensorDataset("mine", ("a",), ("no", "yes"), [(X, labels)]).labels, Y)


@pytest.mark.parametrize("other", [X.to(torch.uint8), X[:, :1]])
def test_environments_of_different_forms_are_refused(other: torch.Tensor) -> None:
    """Bytes beside floats would otherwise be taken for floats up to 255."""
    with pytest.raises(SandmaskError, match="environment 'b': inputs should be like those of 'a'"):
        TensorDataset("mine", ("a", "b"), ("no", "yes"), [(X, Y), (other, Y)])
