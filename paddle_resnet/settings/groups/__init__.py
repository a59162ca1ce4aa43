"""Flags that no component of the training step owns: one module per group, with its Settings and conflicts."""

from paddle_resnet.data import augment
from paddle_resnet.settings import durations
from paddle_resnet.settings.groups import (
    benchmark,
    dataset,
    images,
    loader,
    machine,
    network,
    output,
    saving,
    start,
)

GROUPS = (start, network, dataset, images, augment, loader, durations, saving, machine, output, benchmark)
