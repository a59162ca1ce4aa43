"""Find the networks of timm and torchvision whose weights have the same names and shapes as those of a given network.

`look_alikes.py NETWORK...`, run as a program, prints {NETWORK: {other network: difference of its logits for the same
weights and images, relative to its largest logit}} in JSON. Networks have names such as timm.resnet50. This takes three
minutes. Paddle is not imported, because importing PyTorch after Paddle may crash.
"""

import json
import sys

import numpy as np
import other_projects
import timm
import torch
import torchvision


def networks():
    """Return the names of all classifiers."""
    models = torchvision.models
    names = [*models.list_models(module=models), *models.list_models(module=models.quantization)]
    return [f"timm.{name}" for name in timm.list_models()] + [f"torchvision.{name}" for name in names]


def build(network, classes):
    library, _, name = network.partition(".")
    if library == "timm":
        return timm.create_model(name, num_classes=classes)
    return torchvision.models.get_model(name, weights=None, num_classes=classes)


def shapes(network):
    try:
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in build(network, 7).state_dict().items()}
    except Exception:  # some networks cannot be built on the meta device
        return None


def logits(network):
    model = build(network, other_projects.CLASSES).double().eval()
    arrays = other_projects.weights({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    with torch.no_grad():
        return model(torch.from_numpy(other_projects.images()).double()).numpy()


def difference(actual, expected):
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def main(sources):
    all_shapes = {network: shapes(network) for network in networks()}
    found = {}
    for source in sources:
        expected = logits(source)
        others = [name for name, its in all_shapes.items() if its == all_shapes[source] and name != source]
        found[source] = {name: difference(expected, logits(name)) for name in others}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
