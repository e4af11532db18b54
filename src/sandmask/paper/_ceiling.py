"""What the best possible classifier could do on Spirals when its two invariant dimensions are noisy."""

import torch

from sandmask.datasets.spirals import PUBLISHED, spiral_environment

_CHUNK = 250
_LEAST = 0.02  # a width for the noiseless case, well below the distance between the arms


def noise_ceiling(noise: float) -> float:
    """Accuracy on environment 0, from the two invariant dimensions alone, of the likelier class.

    The density of a class is the mixture of Gaussians of the noise's width around the noiseless examples of the sixteen
    other environments: 16,384 draws of the same spiral.
    """
    others = [spiral_environment(e) for e in range(1, PUBLISHED.environments + 1)]
    centres = torch.cat([inputs[:, :2] for inputs, _ in others]).double()
    classes = torch.cat([labels for _, labels in others])
    points, labels = spiral_environment(0, noise)
    width = max(noise, _LEAST)
    right = 0
    for begin in range(0, len(labels), _CHUNK):
        some, truth = points[begin : begin + _CHUNK, :2].double(), labels[begin : begin + _CHUNK]
        log_density = -torch.cdist(some, centres).square() / (2 * width**2)
        scores = torch.stack([log_density[:, classes == label].logsumexp(1) for label in (0, 1)], 1)
        right += int((scores.argmax(1) == truth).sum())
    return right / len(labels)
