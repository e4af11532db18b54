"""A last layer and a classifier computed as one, against one after the other."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from sandmask.functional.flat import Slot
from sandmask.functional.head import linear_pair
from sandmask.functional.tape import MomentTape
from sandmask.masks import gradient_moments
from sandmask.networks import Network
from sandmask.networks.small import MLP

NAMES = ("weight", "bias", "head", "head_bias")


def tensors(n_runs: int, classes: int = 3) -> list[Tensor]:
    """x [K, 8, 5] and the parameters of layers 5 -> 6 -> classes."""
    torch.manual_seed(0)
    shapes = [(8, 5), (6, 5), (6,), (classes, 6), (classes,)]
    return [torch.randn(n_runs, *shape, dtype=torch.float64) for shape in shapes]


def plain_linear_pair(x: Tensor, weight: Tensor, bias: Tensor, classifier: Tensor, classifier_bias: Tensor) -> Tensor:
    return F.linear(F.linear(x, weight, bias), classifier, classifier_bias)


@pytest.mark.parametrize("classes", [1, 3])
def test_values_and_gradients_are_those_of_two_layers(classes: int) -> None:
    of_one = [tensor[0].requires_grad_() for tensor in tensors(1, classes)]
    found, wanted = linear_pair(*of_one), plain_linear_pair(*of_one)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, of_one, gradient), torch.autograd.grad(wanted, of_one, gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("n_envs", [1, 4])
def test_moments_on_a_tape_are_those_of_each_environments_gradients(n_envs: int) -> None:
    n_runs = 2
    x, *params = tensors(n_runs)
    vectors = torch.cat([param.flatten(1) for param in params], dim=1)
    slots = [Slot(name, param.shape[1:], param[0].numel()) for name, param in zip(NAMES, params, strict=True)]
    tape = MomentTape(slots, n_runs, n_envs, vectors)
    x.requires_grad_()

    def risks(vector: Tensor, x: Tensor) -> Tensor:
        pieces = torch.split(vector, [slot.numel for slot in slots])
        named = {slot.name: slot.read(piece) for slot, piece in zip(slots, pieces, strict=True)}
        with tape.watch(named):
            y = linear_pair(x, *named.values())
        return (y**2).view(n_envs, -1).sum(1)

    leaf = vectors.clone().requires_grad_()
    (of_x,) = torch.autograd.grad(vmap(risks)(leaf, x).sum(), x)
    found = tape.moments()
    for run in range(n_runs):
        of_run = [param[run].clone().requires_grad_() for param in params]
        inputs = x[run].detach().requires_grad_()
        losses = (plain_linear_pair(inputs, *of_run) ** 2).view(n_envs, -1).sum(1)
        grads = [torch.autograd.grad(loss, of_run, retain_graph=True) for loss in losses]
        wanted = gradient_moments(torch.stack([torch.cat([g.flatten() for g in of_env]) for of_env in grads]))
        torch.testing.assert_close(found.mean[run], wanted.mean)
        torch.testing.assert_close(found.m2[run], wanted.m2)
        assert torch.equal(found.sign_sum[run], wanted.sign_sum)
        torch.testing.assert_close(of_x[run], torch.autograd.grad(losses.sum(), inputs)[0])


def test_a_network_has_the_logits_of_its_features() -> None:
    network = Network(lambda: MLP(n_inputs=4, width=16, depth=3), n_classes=2)
    params, x = network.unflatten(network.init(0)), torch.randn(7, 4)
    torch.testing.assert_close(network.logits(params, x), network.classify(params, network.features(params, x)))


def test_many_classes_are_not_paired() -> None:
    assert Network(lambda: MLP(4, 16, 3), n_classes=4)._pairs
    assert not Network(lambda: MLP(4, 16, 3), n_classes=5)._pairs
    assert not Network(lambda: MLP(4, 16, 3), n_classes=2, extra_features=3)._pairs
