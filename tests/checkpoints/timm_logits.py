"""Compute the logits of a timm network with the weights in a .safetensors file, in a separate process, because
importing PyTorch after Paddle may crash. The arguments are the name of the network and a folder with model.safetensors
and images.npy. The result is logits.npy in this folder.
"""

import sys
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import load_file

name, folder = sys.argv[1], Path(sys.argv[2])
network = timm.create_model(name, num_classes=5).eval()
network.load_state_dict(load_file(folder / "model.safetensors"))
with torch.no_grad():
    logits = network(torch.from_numpy(np.load(folder / "images.npy")))
np.save(folder / "logits.npy", logits.numpy())
