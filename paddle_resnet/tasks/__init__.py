"""Tasks: what a network predicts for an image, and everything that depends on it. A task is a class that defines the
labels, the loss head, the metrics and their reduction over all processes, the probabilities, the tables of a report,
and the entries of meta.json and model.json. SingleLabel and MultiLabel have the same attributes and methods; those of
SingleLabel are documented. Other modules ask the task instead of the flag --multi-label.

The modules import Paddle only inside functions, because parsing the command line and reading a report import them.
"""

from paddle_resnet.tasks.multi_label import MultiLabel
from paddle_resnet.tasks.single_label import SingleLabel

Task = SingleLabel | MultiLabel
TASKS: dict[bool, type[SingleLabel] | type[MultiLabel]] = {False: SingleLabel, True: MultiLabel}  # by --multi-label
