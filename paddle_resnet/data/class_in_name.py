"""Classes in the names of image files, such as cat.0.jpg, Abyssinian_100.jpg, rose (3).jpg and cloudy12.jpg."""

import os
import re

# The class, separators and the number of the image; without separators, the class ends in a letter.
_NAME = re.compile(r"(?P<separated>.+?)[\s._-]+(\d+|\(\d+\))|(?P<adjacent>.*[^\W\d_])(\d+|\(\d+\))")


def class_of(path: str) -> str | None:
    """Return the class in the name of an image file, which is the part before the last number, without the separators
    (spaces and . _ -) between both; None if the name contains no number after other characters."""
    match = _NAME.fullmatch(os.path.splitext(os.path.basename(path))[0])
    return match and (match["separated"] or match["adjacent"])


def is_ambiguous(name: str) -> bool:
    """Return whether the result of class_of() may not be the class, because it consists of numbers (3_07.jpg), or ends
    in a separator and a further number (cat_3_07.jpg)."""
    match = _NAME.fullmatch(name)
    return not any(map(str.isalpha, name)) or (match is not None and match["separated"] is not None)
