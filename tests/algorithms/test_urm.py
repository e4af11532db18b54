"""URM against modules with two optimizers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sandmask.algorithms import ALGORITHMS, Problem, State
from sandmask.functional import EnvBatch, random

Train = Callable[..., tuple[list[float], State]]
MakeHparams = Callable[..., dict[str, Tensor]]


def judge(n_features: int) -> nn.ModuleList:
    sizes = [(n_features, 100), (100, 100), (100, 100), (100, 100), (100, 1)]
    return nn.ModuleList(nn.Linear(a, b) for a, b in sizes).double()


def judged(layers: nn.ModuleList, n_hidden: int, z: Tensor) -> Tensor:
    for layer in layers[: 1 + n_hidden]:
        z = F.leaky_relu(layer(z))
    out: Tensor = layers[-1](z)[:, 0]
    return out


@pytest.mark.parametrize(("activation", "n_hidden"), [(0, 1), (1, 3)])
def test_trains_like_modules_with_two_optimizers(
    activation: int, n_hidden: int, problem: Problem, batches: list[EnvBatch], hparams_of: MakeHparams, train: Train
) -> None:
    own = {"urm_generator_output": activation, "urm_discriminator_hidden_layers": n_hidden}
    hparams = hparams_of("URM", urm_adv_lambda=0.7, urm_discriminator_lr=2e-3, weight_decay=0.0, **own)
    losses, state = train("URM", batches, hparams)

    start = train("URM", [], hparams)[1]
    featurizer = problem.featurizer().double()
    classifier = nn.Linear(featurizer.n_features, problem.n_classes).double()
    model = nn.Sequential(featurizer, nn.ReLU() if activation else nn.Tanh(), classifier)
    vector_to_parameters(start["params"].clone(), model.parameters())
    layers = judge(featurizer.n_features)
    vector_to_parameters(start["discriminator"].clone(), layers.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    its_optimizer = torch.optim.Adam(layers.parameters(), lr=2e-3)
    one, zero = torch.ones(21, dtype=torch.float64), torch.zeros(21, dtype=torch.float64)
    judge_by = F.binary_cross_entropy_with_logits
    for step, batch in enumerate(batches):
        key = random.fold(random.key_of(5), step)
        z = model[1](featurizer(batch.x.flatten(0, 1)))
        loss = F.cross_entropy(classifier(z), batch.y.flatten()) + 0.7 * judge_by(judged(layers, n_hidden, z), one)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        noise = random.uniform(random.fold(batch.example_keys.flatten(), key), featurizer.n_features).double()
        noise = noise if activation else 2 * noise - 1
        its_loss = judge_by(judged(layers, n_hidden, noise), one)
        its_loss = its_loss + 0.7 * judge_by(judged(layers, n_hidden, z.detach()), zero)
        its_optimizer.zero_grad()
        its_loss.backward()  # type: ignore[no-untyped-call]
        its_optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-9)
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(state["params"], expected, rtol=1e-7, atol=1e-9)
    logits = ALGORITHMS["URM"].build(problem).predict(state, batches[0].x[0])
    torch.testing.assert_close(logits, model(batches[0].x[0]).detach(), rtol=1e-6, atol=1e-8)
