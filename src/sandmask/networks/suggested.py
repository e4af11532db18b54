"""Networks to choose from: the two of the paper's small experiments, and timm models for a good start."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkEntry:
    """A network as listed."""

    name: str
    summary: str


_SUGGESTED = (
    NetworkEntry("mlp", "multi-layer perceptron; width and depth are hyperparameters (default for Spirals)"),
    NetworkEntry("mnist-convnet", "four convolutions, 128 features (default for the MNIST sets)"),
    NetworkEntry("resnet50.tv_in1k", "ResNet-50, torchvision's first ImageNet weights (default for image sets)"),
    NetworkEntry("resnet18.tv_in1k", "ResNet-18, torchvision's ImageNet weights; a quarter of the work"),
    NetworkEntry("tf_efficientnet_lite0.in1k", "EfficientNet-Lite0, ImageNet; small and fast, 0.5 normalization"),
    NetworkEntry("efficientnet_b0.ra_in1k", "EfficientNet-B0, ImageNet"),
    NetworkEntry("convnext_tiny.fb_in1k", "ConvNeXt-T, ImageNet; no batch-norm to freeze"),
    NetworkEntry("vit_small_patch16_224.augreg_in21k", "ViT-S/16, ImageNet-21k"),
    NetworkEntry("vit_base_patch16_clip_224.openai", "ViT-B/16, CLIP's image tower"),
    NetworkEntry("vit_small_patch14_dinov2.lvd142m", "ViT-S/14, DINOv2, self-supervised"),
    NetworkEntry("vit_base_patch14_dinov2.lvd142m", "ViT-B/14, DINOv2, self-supervised"),
)


def suggested_networks() -> tuple[NetworkEntry, ...]:
    """A short list; every other timm model works too, by its name."""
    return _SUGGESTED
