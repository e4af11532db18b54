"""Hyperparameters that do not depend on the algorithm: hyperparameters of datasets, and options of all runs."""

from sandmask.hparams._hparam import (
    BELOW_ONE,
    COUNT,
    DEPTH,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE_FRACTION,
    Bounds,
    Choice,
    Constant,
    Hparam,
    IntLogUniform,
    LogUniform,
)

SWITCH = Bounds(0, 1)  # for whole numbers: off or on
# Steps after which the learning rate drops, taken from another run with `lr_patience`. 0 means no drop.
LR_DROP_STEPS = ("lr_drop_step_1", "lr_drop_step_2", "lr_drop_step_3")

# If several rows with the same name apply, the last one is used.
SHARED: tuple[Hparam, ...] = (
    Hparam("lr", 1e-3, LogUniform(10, -4.5, -3.5), NON_NEGATIVE, scope="small-image"),
    Hparam("lr", 1e-3, LogUniform(10, -4.5, -2.5), NON_NEGATIVE, scope="small-image", space="domainbed"),
    Hparam("lr", 5e-5, LogUniform(10, -5, -3.5), NON_NEGATIVE, scope="image"),
    Hparam("lr", 1e-2, LogUniform(10, -3.5, -1.5), NON_NEGATIVE, scope="tabular"),
    Hparam("batch_size", 64, IntLogUniform(2, 3, 9), COUNT, scope="small-image"),
    Hparam("batch_size", 32, IntLogUniform(2, 3, 5.5), COUNT, scope="image"),
    Hparam("batch_size", 32, IntLogUniform(2, 3, 5), COUNT, dataset="DomainNet"),
    Hparam("batch_size", 512, IntLogUniform(2, 3, 9), COUNT, scope="tabular"),
    Hparam("weight_decay", 0.0, Constant(0.0), NON_NEGATIVE, scope="small-image"),
    Hparam("weight_decay", 0.0, LogUniform(10, -6, -2), NON_NEGATIVE, scope="image"),
    Hparam("weight_decay", 1e-3, LogUniform(10, -6, -2), NON_NEGATIVE, scope="tabular"),
    Hparam("mlp_width", 256, IntLogUniform(2, 6, 10), COUNT, scope="tabular"),
    Hparam("mlp_depth", 3, Choice(3, 4, 5), DEPTH, scope="tabular"),
    # DomainBed names dropout after the network. The MNIST ConvNet has none, but its value is drawn there, too.
    Hparam("dropout", 0.0, Choice(0.0, 0.1, 0.5), BELOW_ONE, stream="resnet_dropout"),
    Hparam("dropout", 0.0, Choice(0.0, 0.1, 0.5), BELOW_ONE, scope="tabular", stream="mlp_dropout"),
    # The recipe: settings with which gradient masks work on Spirals, the same for every method (results/recipe).
    Hparam("lr", 5e-3, LogUniform(10, -2.75, -2), NON_NEGATIVE, scope="tabular", space="recipe"),
    Hparam("weight_decay", 3e-4, LogUniform(10, -6, -3), NON_NEGATIVE, scope="tabular", space="recipe"),
    Hparam("batch_size", 512, Constant(512), COUNT, scope="tabular", space="recipe"),
    Hparam("mlp_width", 256, Constant(256), COUNT, scope="tabular", space="recipe"),
    Hparam("mlp_depth", 3, Constant(3), DEPTH, scope="tabular", space="recipe"),
    Hparam("dropout", 0.0, Constant(0.0), BELOW_ONE, scope="tabular", space="recipe"),
    Hparam("lr_final", 0.0, Constant(0.0), FRACTION, scope="tabular", space="recipe"),
)

# Options of every run. They are neither drawn nor part of a configuration unless a space or the user sets them. The
# defaults here have no effect.
OPTIONAL: tuple[Hparam, ...] = (
    Hparam("lr_final", 1.0, Constant(1.0), FRACTION),  # cosine schedule: the learning rate ends at this fraction
    Hparam("lr_drop", 1.0, Constant(1.0), FRACTION),  # step schedule: this factor ...
    Hparam("lr_drop_every", 1.0, Constant(1.0), POSITIVE_FRACTION),  # ... after each such fraction of the training
    Hparam("lr_warmup", 0.0, Constant(0.0), FRACTION),  # linear warm-up over this fraction of the training
    Hparam("lr_patience", 0, Constant(0), NON_NEGATIVE),  # evaluations without a lower loss before the rate drops
    *(Hparam(name, 0, Constant(0), NON_NEGATIVE) for name in LR_DROP_STEPS),
    Hparam("decoupled_decay", 0.0, Constant(0.0), NON_NEGATIVE),  # weight decay as in AdamW, beside `weight_decay`
    Hparam("adam_beta1", 0.9, Constant(0.9), BELOW_ONE),  # Adam's momentum
    Hparam("init_scale", 1.0, Constant(1.0), NON_NEGATIVE),  # factor of the initial parameters
    Hparam("sma_start", 100, Constant(100), COUNT),  # iterates that the uniform average leaves out
    Hparam("ema_decay", 0.999, Constant(0.999), BELOW_ONE),  # decay rate of the exponential average
    Hparam("swad_ratio", 0.3, Constant(0.3), NON_NEGATIVE),  # relative rise of the loss at which SWAD ends
    Hparam("holdout_fraction", 0.2, Constant(0.2), Bounds(0, 1, open_low=True, open_high=True)),  # of an environment
    Hparam("full_data", 0, Constant(0), SWITCH),  # also train on the examples that are held back for selection
    Hparam("class_balanced", 0, Constant(0), SWITCH),  # minibatches with equal shares of the classes
    Hparam("data_augmentation", 1, Constant(1), SWITCH),  # augment training images
    Hparam("nonlinear_classifier", 0, Constant(0), SWITCH),  # a classifier with two hidden layers
    Hparam("last_blocks", 0, Constant(0), NON_NEGATIVE),  # vision transformers: blocks whose class tokens are used
    Hparam("attention_only", 0, Constant(0), SWITCH),  # vision transformers: train only the attention layers
    Hparam("freeze_bn", 1, Constant(1), SWITCH),  # batch-norm uses the statistics of the pretrained weights
)
