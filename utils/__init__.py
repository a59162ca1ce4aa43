"""The name of paddle_resnet.utils in NVIDIA's example, for programs that run in a checkout.

Each module of paddle_resnet.utils is registered under both names, so that both names share its classes.
"""

import importlib
import pkgutil
import sys

from paddle_resnet import utils

for _module in pkgutil.iter_modules(utils.__path__):
    sys.modules[f"utils.{_module.name}"] = importlib.import_module(f"paddle_resnet.utils.{_module.name}")
