"""Errors that a user can cause and mend."""


class UsageError(ValueError):
    """A flag, a configuration file, a data set or a checkpoint that cannot be used.

    Raised before the first step. The message is one sentence that names the flag, its value and the remedy;
    train.py prints it and exits with code 2.
    """
